"""Opening a bundle: refused before anything is taken, or opened with options, limits and memory that are stated."""

from graphport.runtime.memory_plan import RunLimits

LIMITS = RunLimits(max_batch=4, max_length=128, prefill_chunk=16)
