"""Prefill and decode speed of an open bundle, on random ids.

In: a LanguageModel, prompt lengths, batch sizes. Out: one row a combination. It compares with nothing (see
`benchmarks/`), and its figures are this machine's.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np

from graphport.runtime.language_model import LanguageModel
from graphport.runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRow:
    """Medians over the repeats. Rates are tokens a second over the whole batch, times are seconds."""

    prompt_length: int
    batch: int
    new_tokens: int
    time_to_first_token_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def measure_speed(
    lm: LanguageModel, *, prompt_length: int, batch: int, new_tokens: int, repeats: int = 3, seed: int = 0
) -> SpeedRow:
    """Time `batch` prompts of `prompt_length` random ids that each continue for `new_tokens` tokens, greedily.

    The time to the first token is that of the last prompt to get one; `lm` should be loaded with room for the batch.
    Raises ValueError when the request cannot fit.
    """
    check_fits(lm, prompt_length=prompt_length, new_tokens=new_tokens)
    random = np.random.default_rng(seed)
    firsts, decodes = [], []
    for _ in range(repeats):
        prompts = random.integers(lm.vocab_size, size=(batch, prompt_length)).tolist()
        first, decode = _time_once(lm, prompts, new_tokens)
        firsts.append(first)
        decodes.append(decode)
    first, decode = statistics.median(firsts), statistics.median(decodes)
    return SpeedRow(
        prompt_length=prompt_length,
        batch=batch,
        new_tokens=new_tokens,
        time_to_first_token_s=first,
        prefill_tokens_per_s=batch * prompt_length / first,
        decode_tokens_per_s=batch * (new_tokens - 1) / decode,
    )


def check_fits(lm: LanguageModel, *, prompt_length: int, new_tokens: int) -> None:
    """Raise ValueError unless a prompt and its continuation fit the bundle, and there is a second token to time."""
    if new_tokens < 2:
        raise ValueError(f"new_tokens must be at least 2 to time decoding, got {new_tokens}")
    if prompt_length + new_tokens > lm.max_length:
        raise ValueError(
            f"prompt_length ({prompt_length}) + new_tokens ({new_tokens}) exceed the bundle's {lm.max_length} tokens; "
            "give shorter prompts or fewer new tokens"
        )


def _time_once(lm: LanguageModel, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """Seconds until every prompt has its first token, and seconds for the others.

    Rows join a batch one after the other, so for several the first figure is that of a run of one token each, and the
    second what a full run takes beyond it.
    """
    if len(prompts) > 1:
        first, whole = _time_batch(lm, prompts, 1), _time_batch(lm, prompts, new_tokens)
        return first, whole - first
    stream = lm.stream(prompts[0], _greedy(new_tokens))
    begin = time.perf_counter()
    next(stream)
    first = time.perf_counter()
    for _ in stream:
        pass
    return first - begin, time.perf_counter() - first


def _time_batch(lm: LanguageModel, prompts: list[list[int]], new_tokens: int) -> float:
    begin = time.perf_counter()
    lm.generate(prompts, _greedy(new_tokens))
    return time.perf_counter() - begin


def _greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
