"""What a prompt and a step of several rows are made of, and what another product than MatMulNBits would make of them.

    python benchmarks/prefill_step.py BUNDLE... [--prompts 32,512] [--rows 1,8,16] [--include FOLDER] [--out FILE.md]

In: bundles for the CPU, prepared or not. Out: milliseconds a prompt, in the chunks of the engine, and a decode step by
number of rows; the share of every op. With --include, the folder of onnxruntime_c_api.h (Debian: libonnxruntime-dev),
each is timed a second time with the custom op of `block_product.c`, which needs AVX-512 VNNI. It serves no text.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import onnx
from block_product_graph import with_block_products
from decode_step_graph import DOMAIN
from options import add_shared_options, lengths
from peer_process import PeerError
from step_runs import Work, decoding, prompt
from step_times import Variant, compiled, run, served_graph

from graphport.model_def.signature import BARE_GRAPH_FILE, GRAPH_FILE
from graphport.runtime.prefill_products import PREFILL_CHUNKS

PROMPTS, ROWS = (32, 512, 2048), (1, 8, 16)
CACHED = 64  # tokens before a decode step
LEAST_REPEATS, TIMED_ROWS = 16, 64  # of a step in a round: rows that are decoded in all
SOURCES = ("block_product_op.c", "block_product.c")
TOLERANCE = 0.05  # of the largest logit: one place of a rounded activation more or less, a fault gives 1


def variants(bundles: list[Path], include: Path | None, folder: Path) -> list[Variant]:
    """The graphs that serve, and with the custom op where it fits."""
    found = [Variant(name=bundle.name, graph=served_graph(bundle)) for bundle in bundles]
    if include is None:
        return found
    library = compiled(SOURCES, (f"-I{include}",), folder)
    for bundle in bundles:
        bare = bundle / BARE_GRAPH_FILE
        model = onnx.load(bare if bare.exists() else bundle / GRAPH_FILE, load_external_data=False)
        if not with_block_products(model, bundle):
            print(f"{bundle}: the prototype takes blocks of 32 at accuracy_level 4; left out", file=sys.stderr)
            continue
        other = bundle / "prefill_step_prototype.onnx"  # weights are found beside it
        onnx.save(model, other)
        name = f"{bundle.name}, prototype"
        found.append(Variant(name=name, graph=other, library=library, like=bundle.name, tolerance=TOLERANCE))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    parser.add_argument("--prompts", type=lengths, default=PROMPTS)
    parser.add_argument("--rows", type=lengths, default=ROWS)
    parser.add_argument("--include", type=Path, metavar="FOLDER", help="of onnxruntime_c_api.h: time the prototype too")
    add_shared_options(parser, rounds=3)
    arguments = parser.parse_args()
    chunk = PREFILL_CHUNKS["cpu"]
    prompts = [prompt(length, chunk=chunk) for length in arguments.prompts]
    steps = [_step(rows) for rows in arguments.rows]
    note = (
        f"Medians. Prompts come in chunks of {chunk} tokens; steps of rows are one token a row after {CACHED}. "
        f"{DOMAIN} is the custom op."
    )
    make = partial(variants, arguments.bundles, arguments.include)
    try:
        run("What prompts and batches are made of", note, make, (*prompts, *steps), arguments)
    except (PeerError, OSError) as error:
        print(f"prefill_step: error: {error}", file=sys.stderr)
        return 1
    return 0


def _step(rows: int) -> Work:
    what = f"{rows} row" + "s" * (rows > 1)
    return decoding(CACHED, rows=rows, repeats=max(LEAST_REPEATS, TIMED_ROWS // rows), what=what)


if __name__ == "__main__":
    sys.exit(main())
