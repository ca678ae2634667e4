"""What a decode step is made of, and what another attention kernel than ONNX Runtime's would make of it.

    python benchmarks/decode_step.py BUNDLE... [--contexts 32,512,2048] [--include FOLDER] [--out FILE.md]

In: bundles for the CPU, prepared or not. Out: milliseconds a step by context, and the share of every op. With
--include, the folder of onnxruntime_c_api.h (Debian: libonnxruntime-dev), a bundle with an int8 cache is timed a second
time with the custom op of `decode_attention.c` for GroupQueryAttention. All are measured in turn. It serves no text.
"""

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from comparison import spread
from decode_step_graph import DOMAIN, HeadShape, with_prototype
from decode_step_runs import StepRun
from machine import commit, describe_machine
from options import add_shared_options, lengths
from peer_process import PeerError
from rounds import Quiet

from graphport.model_def.signature import GRAPH_FILE, PREPARED_FOLDER

CONTEXTS = (32, 512, 2048)
STEPS = 24
SOURCE = Path(__file__).with_name("decode_attention.c")
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-fPIC", "-shared", "-Wall")
SHARES_SHOWN = 6

_LOG_ERRORS = 3  # of ONNX Runtime's levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A graph under test and the library of its custom op, if it has one."""

    name: str
    graph: Path
    library: Path | None = None


def build(shape: HeadShape, include: Path, folder: Path) -> Path:
    """Compile the custom op for one shape of heads. Raises PeerError with what the compiler says."""
    library = folder / "decode_attention.so"
    sizes = (f"-DGROUP={shape.group}", f"-DHEAD={shape.size}", f"-I{include}")
    command = ["cc", *FLAGS, *sizes, str(SOURCE), "-o", str(library), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PeerError("--include compiles a C file and needs a compiler called cc; install gcc") from error
    if done.returncode:
        raise PeerError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return library


def variants(bundles: list[Path], include: Path | None, folder: Path) -> list[Variant]:
    """The graphs that serve, and with the custom op where it fits."""
    found = []
    for bundle in bundles:
        prepared = bundle / PREPARED_FOLDER / GRAPH_FILE
        graph = prepared if prepared.exists() else bundle / GRAPH_FILE
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
        other = graph.with_name("decode_step_prototype.onnx")  # weights are found beside it
        onnx.save(model, other)
        found.append(Variant(name=f"{bundle.name}, prototype", graph=other, library=build(shape, include, folder)))
    return found


def opened(variant: Variant, threads: int, profile: Path | None = None) -> Any:  # noqa: ANN401 - ORT is untyped
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = _LOG_ERRORS  # a cut graph has constants that nothing reads
    if variant.library is not None:
        options.register_custom_ops_library(str(variant.library))
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    return onnxruntime.InferenceSession(str(variant.graph), options, providers=["CPUExecutionProvider"])


def shares(variant: Variant, context: int, threads: int, folder: Path) -> dict[str, float]:
    """Share of the profiled time of a step by op, largest first. What an If runs counts, not the If."""
    session = opened(variant, threads, folder / "profile")
    run = StepRun(session, max_context=context)
    run.times(context, STEPS)
    spent: dict[str, float] = defaultdict(float)
    for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["args"]["op_name"] != "If":
            spent[event["args"]["op_name"]] += event["dur"]
    total = sum(spent.values())
    return {op: time / total for op, time in sorted(spent.items(), key=lambda item: -item[1])}


def measure(
    systems: list[Variant], contexts: tuple[int, ...], rounds: int, quiet: Quiet, threads: int
) -> Mapping[Any, Any]:
    """Milliseconds a step of each variant and context, interleaved. A prototype must give like logits."""
    runs = {variant.name: StepRun(opened(variant, threads), max_context=max(contexts)) for variant in systems}
    for variant in systems:
        if variant.library is not None:
            runs[variant.name].require_like(runs[variant.name.removesuffix(", prototype")], max(contexts))
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for context in contexts:
            for name, run in runs.items():
                times[name, context].extend(quiet.measured(partial(run.timed, context, STEPS)))
    return times


def report(
    times: Mapping[Any, Any], parts: Mapping[Any, Any], contexts: tuple[int, ...], names: list[str], command: str
) -> str:
    head = [
        f"# What a decode step is made of: {', '.join(names)}",
        "",
        f"{datetime.date.today()}, {describe_machine()}.",
    ]
    lines = [*head, f"Command: `{command}`, commit {commit()}, onnxruntime {onnxruntime.__version__}.", ""]
    lines += [f"| | {' | '.join(f'after {context}, ms' for context in contexts)} |", "|---" * (len(contexts) + 1) + "|"]
    for name in names:
        cells = [f"{spread(times[name, context]).median:.2f}" for context in contexts]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Share of the profiled time of a step, the largest first:", ""]
    for name in names:
        for context in contexts:
            largest = list(parts[name, context].items())[:SHARES_SHOWN]
            lines.append(f"* {name}, after {context}: " + ", ".join(f"{op} {part:.0%}" for op, part in largest))
    return "\n".join([*lines, "", f"Batch 1, medians of single steps of one token, {DOMAIN} is the custom op.", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    parser.add_argument("--contexts", type=lengths, default=CONTEXTS)
    parser.add_argument("--include", type=Path, metavar="FOLDER", help="of onnxruntime_c_api.h: time the prototype too")
    add_shared_options(parser, rounds=5)
    arguments = parser.parse_args()
    quiet = Quiet(max_others=arguments.max_others, patience_s=arguments.patience)
    with tempfile.TemporaryDirectory(prefix="graphport-step-") as name:
        systems = variants(arguments.bundles, arguments.include, Path(name))
        try:
            times = measure(systems, arguments.contexts, arguments.rounds, quiet, arguments.threads)
            parts = {
                (variant.name, context): shares(variant, context, arguments.threads, Path(name))
                for variant in systems
                for context in arguments.contexts
            }
        finally:
            for variant in systems:
                if variant.library is not None:
                    variant.graph.unlink()
    names = [variant.name for variant in systems]
    text = report(times, parts, arguments.contexts, names, shlex.join(["python", *sys.argv]))
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
