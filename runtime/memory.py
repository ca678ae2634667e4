"""How many bytes a session needs, compared with what is free before anything is taken.

In: a manifest, sizes, a context and a batch. Out: `MemoryPlan`, or a refusal with the numbers. It allocates nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships no types

from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import DType, Manifest, TensorSpec, past_key

ELEMENT_BYTES: dict[DType, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}

MIB = 1 << 20


class NotEnoughMemoryError(MemoryError):
    """What was asked for does not fit; the message names what is needed, what is free and what would fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of the weights, of the KV cache for a batch and context, and of one step's workspace (an estimate)."""

    weights: int
    cache: int
    workspace: int
    cache_per_token: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.workspace


def plan_memory(
    manifest: Manifest, *, weights_bytes: int, context: int, batch: int, chunk: int, logits_rows: int = 1
) -> MemoryPlan:
    """Memory to serve `batch` rows of `context` tokens with prompts run in chunks of `chunk` tokens."""
    per_token = cache_bytes_per_token(cache_specs(manifest))
    return MemoryPlan(
        weights=weights_bytes,
        cache=per_token * context * batch,
        workspace=_workspace(manifest.config, max(chunk, batch), max(logits_rows, batch)),
        cache_per_token=per_token,
    )


def cache_specs(manifest: Manifest) -> tuple[TensorSpec, ...]:
    """The cache inputs of the graph, K and V of layer 0 first."""
    prefix = past_key(0).split(".", maxsplit=1)[0]
    return tuple(spec for spec in manifest.signature.inputs if spec.name.startswith(prefix))


def cache_bytes_per_token(specs: Sequence[TensorSpec]) -> int:
    """Bytes that one token of one row takes in all cache buffers."""
    return sum(ELEMENT_BYTES[spec.dtype] * prod(size for size in spec.shape if isinstance(size, int)) for spec in specs)


def free_memory() -> int:
    """Bytes this process may still take: of the machine, or of its cgroup if that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
    except OSError:  # no cgroup v2 limit to respect
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))


def require_memory(needed: int, free: int, *, what: str, advice: str) -> None:
    """Raise NotEnoughMemoryError when `needed` bytes for `what` exceed `free`."""
    if needed > free:
        raise NotEnoughMemoryError(f"{what} needs {needed / MIB:.1f} MiB, {free / MIB:.1f} MiB are free; {advice}")


def _workspace(config: TransformerConfig, rows: int, logits_rows: int) -> int:
    """Hidden states, their norm, packed q/k/v and both feed-forward halves alive at once, in float32, plus logits."""
    widest = max(
        block.feed_forward.width * 2
        + (block.attention.num_heads + 2 * block.attention.num_kv_heads) * block.attention.head_dim
        for block in config.blocks
    )
    return 4 * (rows * (3 * config.hidden_size + widest) + logits_rows * config.vocab_size)
