"""What the engine gains by batches, drafts and cached beginnings, and what grammars and long prompts cost.

    python benchmarks/engine.py BUNDLE [--rounds 3] [--new-tokens 64] [--threads N] [--clock wall|cpu] [--out FILE.md]

Everything runs in this process on one bundle with a chat template; the two sides of a ratio take turns, and medians are
compared. Tokens are checked to be the same where they must be. On a busy machine give --clock cpu --threads 1.
"""

import argparse
import dataclasses
import datetime
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import engine_prompts
import numpy as np
from machine import commit, describe_machine

from graphport.runtime import LanguageModel, SamplingParams, load_language_model

PREFIX_TOKENS, QUESTION_TOKENS = 1000, 16
LONG_PROMPT = 4000
BATCHES = (1, 8, 16)
BATCH_PROMPT = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table; `goal` in words, empty where there is none."""

    what: str
    value: str
    goal: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How everything is measured."""

    bundle: Path
    rounds: int
    new_tokens: int
    threads: int | None
    clock: Callable[[], float]

    def load(self, **options: int | bool) -> LanguageModel:
        """The bundle, open."""
        return load_language_model(self.bundle, threads=self.threads, **options)  # type: ignore[arg-type]  # names and types of load

    def times(self, *calls: Callable[[], object]) -> list[float]:
        """Median seconds of each call; they take turns, after one round that does not count."""
        found: list[list[float]] = [[] for _ in calls]
        for number in range(self.rounds + 1):
            for call, times in zip(calls, found, strict=True):
                begin = self.clock()
                call()
                if number:
                    times.append(self.clock() - begin)
        return [statistics.median(times) for times in found]


def main() -> int:
    arguments = _arguments()
    setting = Setting(
        bundle=arguments.bundle,
        rounds=arguments.rounds,
        new_tokens=arguments.new_tokens,
        threads=arguments.threads,
        clock=time.perf_counter if arguments.clock == "wall" else time.process_time,
    )
    figures: list[Figure] = []
    for measure in (batched_decoding, prompt_lookup, cached_prefix, json_schema, longest_gap):
        print(measure.__name__.replace("_", " "), file=sys.stderr)
        figures += measure(setting)
    text = markdown(figures, arguments)
    print(text, end="")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0


def batched_decoding(setting: Setting) -> list[Figure]:
    """Tokens a second of rows together; a run of one token is taken off, so that prompts do not count."""
    goals = {8: ">= 2.5x", 16: ">= 3x"}
    rates = {}
    with setting.load(max_batch=max(BATCHES)) as lm:
        random = np.random.default_rng(0)
        for batch in BATCHES:
            prompts = random.integers(lm.vocab_size, size=(batch, BATCH_PROMPT)).tolist()
            first, whole = setting.times(
                partial(lm.generate, prompts, _greedy(1)), partial(lm.generate, prompts, _greedy(setting.new_tokens))
            )
            rates[batch] = batch * (setting.new_tokens - 1) / (whole - first)
    return [
        Figure(
            what=f"decode, {batch} at once",
            value=f"{rate:.1f} tokens/s ({rate / rates[1]:.2f}x)",
            goal=goals.get(batch, ""),
        )
        for batch, rate in rates.items()
    ]


def prompt_lookup(setting: Setting) -> list[Figure]:
    """Time of answers after their first token, without drafts to that with them."""
    figures = []
    with setting.load(max_batch=1, prompt_lookup=True) as lm:
        for what, prompts, goal in (
            ("copy-heavy prompts", engine_prompts.COPYING, ">= 1.8x"),
            ("other prompts", engine_prompts.OTHER, ">= 0.97x"),
        ):
            ids = [_chat(lm, prompt) for prompt in prompts]
            params = dataclasses.replace(_greedy(2 * setting.new_tokens), ignore_eos=False)
            before = lm.statistics
            leads = [_lead_of_difference(lm, each, params) for each in ids]
            after = lm.statistics
            drafted, right = after.num_drafted - before.num_drafted, after.num_drafted_right - before.num_drafted_right
            first, plain, drafting = setting.times(
                partial(_one_by_one, lm, ids, _greedy(1)),
                partial(_one_by_one, lm, ids, params, speculate=False),
                partial(_one_by_one, lm, ids, params),
            )
            widest = max(leads)
            ids_same = f"first differences at leads up to {widest:.2f} logits" if widest else "same ids"
            value = (
                f"{(plain - first) / (drafting - first):.2f}x, {right} of {drafted} drafted tokens right, {ids_same}"
            )
            figures.append(Figure(what=f"prompt lookup, {what}", value=value, goal=goal))
    return figures


def _one_by_one(lm: LanguageModel, prompts: list[list[int]], params: SamplingParams, *, speculate: bool = True) -> None:
    for prompt in prompts:
        lm.generate([prompt], params, speculate=speculate)


def _lead_of_difference(lm: LanguageModel, ids: list[int], params: SamplingParams) -> float:
    """Lead in logits of the best token over the next where answers with and without drafts first differ; 0: nowhere."""
    (plain,) = lm.generate([ids], dataclasses.replace(params, logprobs=2), speculate=False)
    (drafting,) = lm.generate([ids], params)
    for one, other, sample in zip(plain.token_ids, drafting.token_ids, plain.logprobs or (), strict=False):
        if one != other:
            (_, best), (_, second) = sample.top_logprobs
            return best - second
    return 0.0


def cached_prefix(setting: Setting) -> list[Figure]:
    """Time to the first token of a prompt whose first 1,000 tokens are cached, to that of one that shares nothing."""
    random = np.random.default_rng(0)
    with setting.load(max_batch=1, prefix_cache_bytes=1 << 30) as lm:

        def prompt(length: int) -> list[int]:
            ids: list[int] = random.integers(lm.vocab_size, size=length).tolist()
            return ids

        prefix = prompt(PREFIX_TOKENS)
        lm.generate([prefix], _greedy(1))
        cold, warm = setting.times(
            lambda: next(lm.stream(prompt(PREFIX_TOKENS + QUESTION_TOKENS), _greedy(2))),
            lambda: next(lm.stream([*prefix, *prompt(QUESTION_TOKENS)], _greedy(2))),
        )
    value = f"{warm / cold:.1%} of cold ({warm * 1000:.0f} of {cold * 1000:.0f} ms)"
    return [
        Figure(what=f"first token, {PREFIX_TOKENS} tokens cached, {QUESTION_TOKENS} not", value=value, goal="<= 12 %")
    ]


def json_schema(setting: Setting) -> list[Figure]:
    """Time a token of text that follows a schema, to that of free text; and of the free rows beside one."""
    with setting.load(max_batch=4) as lm:
        ids = _chat(lm, engine_prompts.PERSON)
        constrained = dataclasses.replace(_greedy(200), ignore_eos=False, json_schema=engine_prompts.SCHEMA)
        (output,) = lm.generate([ids], constrained)
        free = _greedy(len(output.token_ids))
        plain, following = setting.times(lambda: lm.generate([ids], free), lambda: lm.generate([ids], constrained))
        rows = [ids] * 4
        alone, beside = setting.times(
            lambda: lm.generate(rows, free), lambda: lm.generate(rows, [constrained, free, free, free])
        )
    return [
        Figure(what="JSON schema to free text, a token", value=f"{following / plain:.2f}x", goal="<= 1.15x"),
        Figure(what="four rows, one of them JSON, to four free rows", value=f"{beside / alone:.2f}x", goal="about 1"),
    ]


def longest_gap(setting: Setting) -> list[Figure]:
    """Longest time between two tokens of a row that runs while a long prompt comes in."""
    figures = []
    for chunk in (64, 512):
        with setting.load(max_batch=2, prefill_chunk=chunk) as lm:
            length = min(LONG_PROMPT, lm.max_length - 2)
            long = np.random.default_rng(0).integers(lm.vocab_size, size=length).tolist()
            gaps = _gaps(lm, long)
        figures.append(
            Figure(
                what=f"longest gap beside a prompt of {length} tokens, prefill_chunk {chunk}",
                value=f"{max(gaps) * 1000:.0f} ms (median {statistics.median(gaps) * 1000:.0f})",
            )
        )
    return figures


def _gaps(lm: LanguageModel, long: list[int]) -> list[float]:
    """Seconds between the tokens of a running row, from when `long` is asked for until it has its first token."""
    running = iter(lm.stream([1, 2, 3], _greedy(lm.max_length - 4)))
    next(running)
    other = threading.Thread(target=lm.generate, args=([long], _greedy(1)))
    last = time.perf_counter()
    other.start()
    gaps = []
    while other.is_alive():
        next(running)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    return gaps


def _greedy(new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)


def _chat(lm: LanguageModel, text: str) -> list[int]:
    if lm.tokenizer is None:
        raise SystemExit("engine: error: the bundle has no tokenizer")
    return lm.tokenizer.apply_chat_template([{"role": "user", "content": text}])


def markdown(figures: Sequence[Figure], arguments: argparse.Namespace) -> str:
    """The table, with where and how it was measured."""
    threads = f"{arguments.threads} threads" if arguments.threads else "a thread a core"
    lines = [
        "# Engine",
        "",
        f"{datetime.date.today().isoformat()}, {describe_machine()}, {threads}, {arguments.clock} time.",
        f"Command: `python {shlex.join(sys.argv)}`, commit {commit()}. Medians of {arguments.rounds} rounds.",
        "",
        "| | measured | to reach |",
        "|---|---|---|",
        *(f"| {figure.what} | {figure.value} | {figure.goal} |" for figure in figures),
    ]
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
