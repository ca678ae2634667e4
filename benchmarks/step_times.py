"""Graphs of one model measured in turn: milliseconds of work, and the share of every op in it.

In: graphs that serve, and variants of them in which a custom op stands for a kernel of ONNX Runtime's. Out: a table.
Used by `decode_step.py` and `prefill_step.py`, which make the variants; it serves no text.
"""

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
from comparison import spread
from machine import commit, describe_machine
from peer_process import PeerError
from rounds import Quiet
from step_runs import StepRun, Work, timed

from graphport.model_def.signature import GRAPH_FILE, PREPARED_FOLDER

Times = dict[tuple[str, str], list[float]]  # milliseconds by variant and work

_HERE = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-Wall")
_SHARES_SHOWN = 6
_LOG_ERRORS = 3  # of ONNX Runtime's levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A graph under test. One with a custom op has its library, and the name of the variant that it must compute like:
    logits differ by at most `tolerance` times the largest. Its graph is removed after the measurement.
    """

    name: str
    graph: Path
    library: Path | None = None
    like: str | None = None
    tolerance: float = 0.0


def served_graph(bundle: Path) -> Path:
    """The graph that serves here: the prepared one where there is one."""
    prepared = bundle / PREPARED_FOLDER / GRAPH_FILE
    return prepared if prepared.exists() else bundle / GRAPH_FILE


def compiled(sources: Sequence[str], flags: Sequence[str], folder: Path) -> Path:
    """A shared library of C files beside this one, below `folder`. Raises PeerError with what the compiler says."""
    library = folder / Path(sources[0]).with_suffix(".so")
    command = ["cc", *_FLAGS, *flags, *(str(_HERE / name) for name in sources), "-o", str(library), "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PeerError("a C file must be compiled, which needs a compiler called cc; install gcc") from error
    if done.returncode:
        raise PeerError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return library


def opened(variant: Variant, threads: int, profile: Path | None = None) -> Any:  # noqa: ANN401 - ORT is untyped
    """A session on the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = _LOG_ERRORS  # a cut graph has constants that nothing reads
    if variant.library is not None:
        options.register_custom_ops_library(str(variant.library))
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    return onnxruntime.InferenceSession(str(variant.graph), options, providers=["CPUExecutionProvider"])


def shares(variant: Variant, work: Work, threads: int, folder: Path) -> dict[str, float]:
    """Share of the profiled time of the work by op, largest first. What an If runs counts, not the If."""
    session = opened(variant, threads, folder / "profile")
    StepRun(session, rows=work.rows, capacity=work.capacity).times(work)
    spent: dict[str, float] = defaultdict(float)
    for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["args"]["op_name"] != "If":
            spent[event["args"]["op_name"]] += event["dur"]
    total = sum(spent.values())
    return {op: time / total for op, time in sorted(spent.items(), key=lambda item: -item[1])}


def measure(variants: list[Variant], works: tuple[Work, ...], rounds: int, quiet: Quiet, threads: int) -> Times:
    """Milliseconds of each variant and work; variants take turns. Those with a custom op must give like logits."""
    capacities = {work.rows: max(one.capacity for one in works if one.rows == work.rows) for work in works}
    runs = {}
    for variant in variants:
        session = opened(variant, threads)
        runs[variant.name] = {rows: StepRun(session, rows=rows, capacity=most) for rows, most in capacities.items()}
    for variant in variants:
        if variant.like is not None:
            for work in works:
                like = runs[variant.like][work.rows]
                runs[variant.name][work.rows].require_like(like, work, tolerance=variant.tolerance)
    times: Times = defaultdict(list)
    for _ in range(rounds):
        for name, of_rows in runs.items():
            for what, spent in quiet.measured(partial(timed, of_rows, works)).items():
                times[name, what].extend(spent)
    return times


def report(
    title: str,
    times: Times,
    parts: dict[tuple[str, str], dict[str, float]],
    variants: list[Variant],
    works: tuple[Work, ...],
) -> str:
    """The table, where and how it was measured, and the shares."""
    names = [variant.name for variant in variants]
    medians = {key: spread(spent).median for key, spent in times.items()}
    lines = [
        f"# {title}: {', '.join(names)}",
        "",
        f"{datetime.date.today()}, {describe_machine()}.",
        f"Command: `{shlex.join(['python', *sys.argv])}`, commit {commit()}, onnxruntime {onnxruntime.__version__}.",
        "",
        f"| | {' | '.join(f'{work.what}, ms' for work in works)} |",
        "|---" * (len(works) + 1) + "|",
    ]
    for name in names:
        lines.append(f"| {name} | {' | '.join(f'{medians[name, work.what]:.2f}' for work in works)} |")
    for variant in variants:
        if variant.like is not None:
            gains = [medians[variant.like, work.what] / medians[variant.name, work.what] for work in works]
            lines.append(f"| {variant.name}: times as fast | {' | '.join(f'{gain:.2f}' for gain in gains)} |")
    lines += ["", "Share of the profiled time, the largest first:", ""]
    for name in names:
        for work in works:
            largest = list(parts[name, work.what].items())[:_SHARES_SHOWN]
            lines.append(f"* {name}, {work.what}: " + ", ".join(f"{op} {part:.0%}" for op, part in largest))
    return "\n".join([*lines, ""])


def run(
    title: str,
    note: str,
    make_variants: Callable[[Path], list[Variant]],
    works: tuple[Work, ...],
    arguments: argparse.Namespace,
) -> None:
    """Make the variants with the help of an empty folder, measure, print the table and write it."""
    quiet = Quiet(max_others=arguments.max_others, patience_s=arguments.patience)
    with tempfile.TemporaryDirectory(prefix="graphport-step-") as name:
        variants = make_variants(Path(name))
        try:
            times = measure(variants, works, arguments.rounds, quiet, arguments.threads)
            parts = {
                (variant.name, work.what): shares(variant, work, arguments.threads, Path(name))
                for variant in variants
                for work in works
            }
        finally:
            for variant in variants:
                if variant.like is not None:
                    variant.graph.unlink()
    text = report(title, times, parts, variants, works) + f"\n{note}\n"
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
