"""Command-line options that the benchmarks share. In: text. Out: checked values, or argparse's error."""

import argparse
import os
from pathlib import Path


def count(text: str) -> int:
    """A positive number, for argparse."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"a positive number is needed, got {text!r}")
    return int(text)


def lengths(text: str) -> tuple[int, ...]:
    """Different positive numbers in ascending order from "512,32", for argparse."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def share(text: str) -> float:
    """A number from 0 to 1, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"a share from 0 to 1 is needed, got {text!r}")
    return value


def table(text: str) -> Path:
    """The name of a table to write, for argparse."""
    if not text.endswith(".md"):
        raise argparse.ArgumentTypeError(f"the table's name must end in .md, got {text}")
    return Path(text)


def add_shared_options(parser: argparse.ArgumentParser, *, rounds: int) -> None:
    """The options of every benchmark; refuses machines without /proc."""
    if not Path("/proc/self/status").exists():
        parser.error("memory and CPU time are read from /proc, so this benchmark needs Linux")
    parser.add_argument("--threads", type=count, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=count, default=rounds)
    parser.add_argument("--max-others", type=share, default=0.1, help="share of the CPU others may take in a run")
    parser.add_argument(
        "--cpu-time", action="store_true", help="for a busy machine: one thread, its CPU time, no waiting for others"
    )
    parser.add_argument("--patience", type=count, default=600, help="seconds to wait for the others, in all")
    parser.add_argument("--out", type=table, metavar="FILE.md", help="the table; a picture is written beside it")


def clock(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """The clock of the workers, "wall" or "cpu". Refuses CPU time of several threads: their spinning would count."""
    if arguments.cpu_time and (arguments.threads > 1 or arguments.max_others < 1):
        parser.error("--cpu-time times one thread beside others: give --threads 1 --max-others 1 with it")
    return "cpu" if arguments.cpu_time else "wall"
