"""What a decode step is made of, and what another attention kernel than ONNX Runtime's would make of it.

    python benchmarks/decode_step.py BUNDLE... [--contexts 32,512,2048] [--include FOLDER] [--out FILE.md]

In: bundles for the CPU, prepared or not. Out: milliseconds a step by context, and the share of every op. With
--include, the folder of onnxruntime_c_api.h (Debian: libonnxruntime-dev), a bundle with an int8 cache is timed a second
time with the custom op of `decode_attention.c` for GroupQueryAttention. All are measured in turn. It serves no text.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import onnx
from decode_step_graph import DOMAIN, with_prototype
from options import add_shared_options, lengths
from peer_process import PeerError
from step_runs import decoding
from step_times import Variant, compiled, run, served_graph

CONTEXTS = (32, 512, 2048)
FLAGS = ("-ffast-math", "-fno-finite-math-only")
TOLERANCE = 0.05  # of the largest logit: one place of a rounded cache or activation more or less, a fault gives 1


def variants(bundles: list[Path], include: Path | None, folder: Path) -> list[Variant]:
    """The graphs that serve, and with the custom op where it fits."""
    found = []
    for bundle in bundles:
        graph = served_graph(bundle)
        found.append(Variant(name=bundle.name, graph=graph))
        if include is None:
            continue
        model = onnx.load(graph, load_external_data=False)
        shape = with_prototype(model)
        if shape is None:
            print(
                f"{bundle}: the prototype takes int8 caches with one scale and rotated keys; left out", file=sys.stderr
            )
            continue
        flags = (*FLAGS, f"-DGROUP={shape.group}", f"-DHEAD={shape.size}", f"-I{include}")
        library = compiled(["decode_attention.c"], flags, folder)
        other = graph.with_name("decode_step_prototype.onnx")  # weights are found beside it
        onnx.save(model, other)
        name = f"{bundle.name}, prototype"
        found.append(Variant(name=name, graph=other, library=library, like=bundle.name, tolerance=TOLERANCE))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    parser.add_argument("--contexts", type=lengths, default=CONTEXTS)
    parser.add_argument("--include", type=Path, metavar="FOLDER", help="of onnxruntime_c_api.h: time the prototype too")
    add_shared_options(parser, rounds=5)
    arguments = parser.parse_args()
    works = tuple(decoding(context) for context in arguments.contexts)
    note = f"Batch 1, medians of single steps of one token, {DOMAIN} is the custom op."
    make = partial(variants, arguments.bundles, arguments.include)
    try:
        run("What a decode step is made of", note, make, works, arguments)
    except (PeerError, OSError) as error:
        print(f"decode_step: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
