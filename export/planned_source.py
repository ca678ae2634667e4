"""Sizes of what an export of a SOURCE would hold, from its header or configuration alone.

In: a source and the export's options. Out: `PlannedSource`. No weight is read and nothing is exported, so sizes of
matrices are those of their form; of a GGUF file's own blocks they are an estimate.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from graphport.export.export_limits import longest_context
from graphport.export.graph_pass import CompilePlan
from graphport.export.lower_experts import block_limit
from graphport.export.lower_linear import TABLES
from graphport.export.precision_choice import FLOAT_SOURCE_PRECISION
from graphport.export.source import call_function
from graphport.export.targets import CPU, WEIGHT_BLOCK, Precision, Target, TargetError, find_target
from graphport.export.window_caches import window_layers
from graphport.model_def.checkpoint import CheckpointError
from graphport.model_def.checkpoint_config import read_checkpoint_config
from graphport.model_def.config import TransformerConfig
from graphport.model_def.experts import is_deciding
from graphport.model_def.signature import DType
from graphport.model_def.transformer import Transformer, parameter_shapes

# A block's scale as the kernels read it, and the element types of activations.
_SCALE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Bytes of a GGUF file's matrices in a bundle to those in the file: scales are widened, minima get sums of their own
# (SmolLM2-135M, Q4_1: 114 MB of 94).
_KEPT_BLOCKS = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSource:
    """What decides an export's memory. `blocks`: bytes, of `weights`, of quantised matrices."""

    config: TransformerConfig
    target: str
    precision: str
    float_type: DType
    cache_dtype: DType
    context: int
    weights: int
    blocks: int
    fused_attention: bool
    window_layers: tuple[int, ...]


def planned_source(
    source: str, *, target: str, precision: str | None, kv_cache: str, context: int | None
) -> PlannedSource:
    """Sizes of the export of `source` with these options. Raises CheckpointError and TargetError."""
    found = find_target(target)
    config, matrix_bytes = _read(source)
    row = found.precision(
        precision or ("gguf" if matrix_bytes is not None and found is CPU else FLOAT_SOURCE_PRECISION)
    )
    if row.keeps_blocks and matrix_bytes is None:
        raise TargetError(f"precision gguf keeps the blocks of a GGUF file; {source} is none: choose another")
    cache = found.cache_format(kv_cache, row)
    longest, _ = longest_context(config, context)
    weights, blocks = _weights(config, row, matrix_bytes if row.keeps_blocks else None)
    return PlannedSource(
        config=config,
        target=target,
        precision=row.name,
        float_type=row.activations,
        cache_dtype=row.activations if cache is None else cache.dtype,
        context=longest,
        weights=weights,
        blocks=blocks,
        fused_attention=_is_fused(config, found),
        window_layers=window_layers(CompilePlan(config=config, target=found, precision=row, max_length=longest)),
    )


def _read(source: str) -> tuple[TransformerConfig, int | None]:
    path, colon, function = source.rpartition(":")
    if not (colon and path.endswith(".py")):
        return read_checkpoint_config(Path(source))
    made = call_function(Path(path), function)
    config = made.config if isinstance(made, Transformer) else made
    if not isinstance(config, TransformerConfig):
        raise CheckpointError(f"{source} returned {type(made).__name__}; needed is a TransformerConfig or Transformer")
    return config, None


def _weights(config: TransformerConfig, precision: Precision, kept: int | None) -> tuple[int, int]:
    """Bytes of all weights, and of those in blocks; `kept` are the bytes of a GGUF file's own matrices."""
    floats = blocks = 0
    element = _SCALE_BYTES[precision.activations]
    for name, shape in parameter_shapes(config).items():
        bits = precision.table_bits if name in TABLES else precision.weight_bits
        if len(shape) < 2 or bits is None or is_deciding(name) or _are_float_experts(name, config):
            floats += prod(shape) * element
        elif kept is None:
            groups = -(-shape[-1] // WEIGHT_BLOCK) * prod(shape[:-1])
            blocks += groups * (WEIGHT_BLOCK * bits // 8 + element)
    if kept is not None:
        blocks = int(_KEPT_BLOCKS * kept)
    return floats + blocks, blocks


def _are_float_experts(name: str, config: TransformerConfig) -> bool:
    """Whether these are matrices of experts, whose widths are no whole blocks, or their biases."""
    if ".experts." not in name:
        return False
    experts = config.blocks[int(name.split(".")[1])].feed_forward
    return name.endswith(".bias") or block_limit(config.hidden_size, experts.width) is not None


def _is_fused(config: TransformerConfig, target: Target) -> bool:
    return all(target.attention_limit(block.attention) is None for block in config.blocks)
