"""What an engine has done since it was opened, in numbers that monitoring can read at any time.

In: an engine. Out: one record. Counts are read without stopping a step, so those of one record may be a step apart.
"""

from dataclasses import dataclass

from graphport.runtime.engine import Engine
from graphport.runtime.prefix_cache import PrefixCacheStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """Requests and tokens.

    num_waiting: sequences without a place yet. num_active: those with one. num_steps: runs of the model, of prompts and
    of rows together. num_prompt_tokens: that were run, reused ones not counted. num_generated_tokens: of all sequences.
    num_drafted, num_drafted_right: tokens that were drafted, and that were right. prefix_cache: None without one.
    cache_bytes: that the KV cache takes now.
    """

    num_waiting: int
    num_active: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_drafted: int
    num_drafted_right: int
    cache_bytes: int
    prefix_cache: PrefixCacheStatistics | None


def engine_statistics(engine: Engine) -> EngineStatistics:
    """The record of `engine` now."""
    cache, prefixes = engine.cache, engine.reuse.prefixes
    groups = (*engine.arrivals, *engine.scheduler.waiting)
    return EngineStatistics(
        num_waiting=sum(len(group.sequences) for group in groups),
        num_active=engine.scheduler.num_active,
        num_steps=engine.num_steps,
        num_prompt_tokens=engine.num_prompt_tokens,
        num_generated_tokens=engine.num_generated_tokens,
        num_drafted=engine.num_drafted,
        num_drafted_right=engine.num_drafted_right,
        cache_bytes=cache.bytes_for(cache.num_slots, cache.capacity),
        prefix_cache=None if prefixes is None else prefixes.statistics,
    )
