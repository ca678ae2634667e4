"""Decoding of rows together: graphport and onnxruntime-genai on the same prompts, threads and machine.

    python benchmarks/batches.py MODEL.gguf BUNDLE... [--rows 1,8,16] [--prompt 32] [--out FILE.md]

In: the source, and bundles made from it. Out: new tokens a second of all rows together, by number of rows. Every system
is a process of its own, in the environment that `compare.py` makes; they take turns. A run of one new token is taken
off, so that prompts do not count. `--peers none` leaves genai out.
"""

import argparse
import datetime
import shlex
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

from comparison import conditions, spread
from machine import commit, describe_machine
from options import add_shared_options, clock, count, lengths
from peer_environments import environment, genai_model
from peer_process import CpuTimes, PeerError, PeerProcess, System, started
from rounds import Plan, Quiet, opening

from graphport.runtime.bundle_files import open_bundle

GENAI = "onnxruntime-genai int4"
ROWS, PROMPT, NEW_TOKENS = (1, 8, 16), 32, 48

Rates = dict[tuple[str, int], list[float]]  # tokens a second by system and rows


def systems(arguments: argparse.Namespace) -> dict[str, System]:
    """The bundles, and genai unless it is left out."""
    here, options = Path(sys.executable), {"max_batch": str(max(arguments.rows))}
    found = [
        System(name=f"graphport {bundle.name}", python=here, script="peer_graphport.py", model=bundle, options=options)
        for bundle in arguments.bundles
    ]
    if arguments.peers == "genai":
        python = environment("genai", arguments.environments)
        model = genai_model(arguments.source, python, arguments.environments)
        found.append(System(name=GENAI, python=python, script="peer_genai.py", model=model))
    return {system.name: system for system in found}


def measure(plan: Plan, rows: tuple[int, ...], quiet: Quiet) -> Rates:
    """`plan.rounds` rounds; each begins with another system. The prompts of a round are the same for all."""
    rates: Rates = defaultdict(list)
    with started(plan.systems, threads=plan.threads, clock=plan.clock) as workers:
        for name, worker in workers.items():
            worker.ask(**opening(plan.systems[name], threads=plan.threads, context=plan.context))
            for together in rows:  # warms up
                worker.ask("batch", prompts=_prompts(plan, together, 0), new_tokens=2)
        names = list(workers)
        for number in range(plan.rounds):
            print(f"round {number + 1} of {plan.rounds}", file=sys.stderr)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                for together, rate in quiet.measured(partial(_rates, plan, workers[name], rows, number + 1)).items():
                    rates[name, together].append(rate)
    return rates


def _rates(plan: Plan, worker: PeerProcess, rows: tuple[int, ...], number: int) -> tuple[dict[int, float], float]:
    """Tokens a second by rows in one round, and the share of the CPU that other processes took meanwhile."""
    before, rates = CpuTimes.now(worker.pid), {}
    for together in rows:
        prompts = _prompts(plan, together, number)
        first, whole = (worker.ask("batch", prompts=prompts, new_tokens=new)["seconds"] for new in (1, plan.new_tokens))
        if whole <= first:
            raise PeerError(
                f"{worker.name} took no longer for {plan.new_tokens} tokens than for one; give a larger --new-tokens"
            )
        rates[together] = together * (plan.new_tokens - 1) / (whole - first)
    return rates, CpuTimes.now(worker.pid).others_since(before)


def _prompts(plan: Plan, together: int, number: int) -> list[list[int]]:
    (length,) = plan.prompts
    return [plan.prompt(length, seed=number * max(ROWS) + row) for row in range(together)]


def markdown(rates: Rates, plan: Plan, rows: tuple[int, ...], quiet: Quiet) -> str:
    """The tables, with where and how they were measured."""
    (length,) = plan.prompts
    names = list(plan.systems)
    median = {key: spread(each).median for key, each in rates.items()}
    head = [f"| | {' | '.join(f'rows: {together}' for together in rows)} |", "|---" * (len(rows) + 1) + "|"]
    lines = [
        f"# Rows together: {', '.join(names)}",
        "",
        f"{datetime.date.today().isoformat()}, {describe_machine()}, {conditions(plan.threads, plan.clock)}.",
        f"Command: `python {shlex.join(sys.argv)}`, commit {commit()}.",
        "",
        f"New tokens a second of all rows, {plan.new_tokens} a row after prompts of {length}: medians of {plan.rounds} "
        f"interleaved rounds, in brackets slowest and fastest; {quiet.redone} disturbed measurements were done again.",
        "",
        *head,
    ]
    for name in names:
        spreads = [spread(rates[name, together]) for together in rows]
        cells = [f"{each.median:.0f} ({each.least:.0f}-{each.most:.0f})" for each in spreads]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"Times as many as with {rows[0]}, and as genai:", "", *head]
    for name in names:
        gains = [f"{median[name, together] / median[name, rows[0]]:.2f}" for together in rows]
        if GENAI in names:
            peer = [f"{median[name, together] / median[GENAI, together]:.2f}" for together in rows]
            gains = [f"{gain}, {ratio}" for gain, ratio in zip(gains, peer, strict=True)]
        lines.append(f"| {name} | {' | '.join(gains)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = _arguments()
    quiet = Quiet(max_others=arguments.max_others, patience_s=arguments.patience)
    try:
        plan = Plan(
            systems=systems(arguments),
            prompts=(arguments.prompt,),
            new_tokens=arguments.new_tokens,
            rounds=arguments.rounds,
            threads=arguments.threads,
            vocab_size=open_bundle(arguments.bundles[0]).manifest.config.vocab_size,
            clock=arguments.clock,
        )
        text = markdown(measure(plan, arguments.rows, quiet), plan, arguments.rows, quiet)
    except (PeerError, ValueError, OSError) as error:
        print(f"batches: error: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the file or folder that the bundles were made from")
    parser.add_argument("bundles", type=Path, nargs="+", metavar="bundle")
    parser.add_argument("--peers", choices=("genai", "none"), default="genai")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"), help="where the peer is installed")
    parser.add_argument("--rows", type=lengths, default=ROWS, metavar="N,...")
    parser.add_argument("--prompt", type=count, default=PROMPT, metavar="N")
    parser.add_argument("--new-tokens", type=count, default=NEW_TOKENS)
    add_shared_options(parser, rounds=3)
    arguments = parser.parse_args()
    arguments.clock = clock(parser, arguments)
    if not arguments.source.exists():
        parser.error(f"{arguments.source} is no file or folder")
    if arguments.new_tokens < 2:
        parser.error("--new-tokens must be at least 2 to time decoding")
    names = [bundle.name for bundle in arguments.bundles]
    if len(set(names)) < len(names):
        parser.error(f"the bundles' folders need different names for the table, got {', '.join(names)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
