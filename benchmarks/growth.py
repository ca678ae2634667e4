"""Decode time against context length and model width: what one more token in the cache costs.

    python benchmarks/growth.py [--contexts 128,...,8192] [--rounds 3] [--out FILE.md]

Exports the random models of `growth_models.py` and decodes after prompts of each length, interleaved. Writes a table,
and a picture beside it. Time a token should be a line in the length: a + b * length.
"""

import argparse
import datetime
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import growth_models
import numpy as np
from comparison import Run, conditions, spread
from comparison_plot import new_figure
from growth_plot import write_plot
from machine import commit, describe_machine
from options import add_shared_options, clock, lengths
from peer_process import PeerError, System
from rounds import Plan, Quiet, measure_rounds

from graphport.export import export

NEW_TOKENS = 32
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Milliseconds a new token by context length, and the line a + b * length through them (least squares).

    `b` is in microseconds a cached token, `deviation` the largest distance from the line relative to the time.
    """

    times: Mapping[int, float]
    a: float
    b: float
    deviation: float


def growth(runs: list[Run]) -> Growth:
    """Medians of one model's runs and their line. Raises ValueError for fewer than two lengths."""
    times = {
        length: spread([run.rest_s for run in runs if run.prompt == length]).median / (NEW_TOKENS - 1) * 1000
        for length in sorted({run.prompt for run in runs})
    }
    if len(times) < 2:
        raise ValueError(f"a line needs two context lengths, got {list(times)}")
    slope, start = np.polyfit(list(times), list(times.values()), 1)
    line = {length: start + slope * length for length in times}
    return Growth(
        times=times,
        a=float(start),
        b=float(slope) * 1000,
        deviation=float(max(abs(times[length] - line[length]) / times[length] for length in times)),
    )


def main() -> int:
    arguments = _arguments()
    try:
        if arguments.out is not None:
            new_figure(1, 1)  # fails now, not after the measurement
        runs = _measure(arguments)
    except (PeerError, ValueError, OSError, ImportError) as error:
        print(f"growth: error: {error}", file=sys.stderr)
        return 1
    found = {width: growth([run for run in runs if run.system == _name(width)]) for width in growth_models.WIDTHS}
    text = _markdown(found, arguments)
    print(text, end="")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        picture = arguments.out.with_suffix(".png")
        write_plot(found, picture)
        arguments.out.write_text(f"{text}\n![time a token by context and width]({picture.name})\n", encoding="utf-8")
    return 0


def _measure(arguments: argparse.Namespace) -> list[Run]:
    quiet = Quiet(max_others=arguments.max_others, patience_s=arguments.patience)
    with tempfile.TemporaryDirectory() as folder:
        systems = {_name(width): _exported(width, Path(folder)) for width in growth_models.WIDTHS}
        plan = Plan(
            systems=systems,
            prompts=arguments.contexts,
            new_tokens=NEW_TOKENS,
            rounds=arguments.rounds,
            threads=arguments.threads,
            vocab_size=growth_models.VOCAB_SIZE,
            clock=arguments.clock,
        )
        return measure_rounds(plan, quiet)


def _exported(width: int, folder: Path) -> System:
    print(f"export: width {width}", file=sys.stderr)
    out = folder / str(width)
    function = growth_models.WIDTHS[width].__name__
    export(f"{growth_models.__file__}:{function}", out, precision="int8", verify=False)
    return System(name=_name(width), python=Path(sys.executable), script="peer_graphport.py", model=out)


def _name(width: int) -> str:
    return f"width {width}"


def _markdown(found: Mapping[int, Growth], arguments: argparse.Namespace) -> str:
    lines = [
        "# Decode time by context length and model width",
        "",
        f"{datetime.date.today().isoformat()}, {describe_machine()}, {conditions(arguments.threads, arguments.clock)}.",
        f"Command: `python {shlex.join(sys.argv)}`, commit {commit()}.",
        "",
        f"Milliseconds a new token after a prompt of that many tokens: median of {arguments.rounds} interleaved rounds "
        f"of {NEW_TOKENS} tokens, batch 1. Models: {growth_models.LAYERS} layers, random int8 weights, float32 cache, "
        f"heads of {growth_models.HEAD_DIM}, one KV head for {growth_models.QUERIES_PER_KV_HEAD}. The line is "
        "a + b * length by least squares.",
        "",
        f"| width | {' | '.join(map(str, arguments.contexts))} | a, ms | b, us a cached token | off the line by |",
        "|" + "---|" * (len(arguments.contexts) + 4),
    ]
    for width, one in found.items():
        times = " | ".join(f"{time:.2f}" for time in one.times.values())
        lines.append(f"| {width} | {times} | {one.a:.2f} | {one.b:.3f} | {one.deviation:.0%} |")
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=lengths, default=CONTEXTS, metavar="N,...")
    add_shared_options(parser, rounds=3)
    arguments = parser.parse_args()
    arguments.clock = clock(parser, arguments)
    if len(arguments.contexts) < 2:
        parser.error("--contexts needs two lengths or more to draw a line through")
    if max(arguments.contexts) + NEW_TOKENS > growth_models.MAX_POSITIONS:
        parser.error(f"the models hold {growth_models.MAX_POSITIONS} tokens, {NEW_TOKENS} of them new")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
