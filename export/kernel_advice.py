"""Where a model's sizes keep it off a target's fastest kernels, or cost bytes: warnings for the report.

In: a plan and the compiled graph. Out: lines that name the layers, the size found and the fast sizes. It changes
nothing: padding heads to a fast size would cost weights and cache that every step reads.
"""

from collections.abc import Iterator

import onnx_ir as ir

from graphport.export.graph_pass import CompilePlan
from graphport.model_def.block_config import AttentionConfig


def kernel_advice(model: ir.Model, plan: CompilePlan) -> tuple[str, ...]:
    """Warnings for `plan`'s target; none when all its preferences are met."""
    layers: dict[str, list[int]] = {}
    for layer, block in enumerate(plan.config.blocks):
        for reason in _slow_decode(block.attention, plan):
            layers.setdefault(reason, []).append(layer)
    attention = tuple(
        f"{_name_layers(found, plan.config.num_layers)}: decoding misses {plan.target.fast_decode.kernel}, {reason}"
        + ("" if plan.cache is None else f"; the {plan.cache.name} cache is widened at every step")
        for reason, found in layers.items()
        if plan.target.fast_decode is not None
    )
    return attention + tuple(_narrow_products(model, plan)) + tuple(_padded_blocks(model))


def _slow_decode(attention: AttentionConfig, plan: CompilePlan) -> Iterator[str]:
    fast = plan.target.fast_decode
    if fast is None or not attention.causal:  # an encoder decodes nothing
        return
    if attention.head_dim not in fast.head_dims:
        yield f"head size {attention.head_dim} is not one of {_list(fast.head_dims)}"
    group = attention.num_heads // attention.num_kv_heads
    groups = fast.groups if plan.cache is None else fast.quantised_groups
    if group not in groups:
        yield f"{group} query heads share a key/value head, which is not one of {_list(groups)}"
    if attention.softcap is not None:
        yield f"scores are capped at {attention.softcap:g}"


def _narrow_products(model: ir.Model, plan: CompilePlan) -> Iterator[str]:
    """Quantised matrices whose number of rows the fast product does not take."""
    multiples = dict(plan.target.fast_rows)
    slow: dict[tuple[int, int], int] = {}
    for node in model.graph:
        if node.op_type != "MatMulNBits":
            continue
        rows, bits = node.attributes["N"].as_int(), node.attributes["bits"].as_int()
        if bits in multiples and rows % multiples[bits]:
            slow[bits, rows] = slow.get((bits, rows), 0) + 1
    for (bits, rows), count in slow.items():
        takes = f"multiples of {multiples[bits]}"
        yield f"{count} {bits}-bit products of {rows} rows miss the compact GEMM, which takes {takes}"


def _padded_blocks(model: ir.Model) -> Iterator[str]:
    """Quantised matrices whose width is no whole number of blocks: zeros fill the last one."""
    padded: dict[tuple[int, int, int], int] = {}
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            bits, block, width = (node.attributes[key].as_int() for key in ("bits", "block_size", "K"))
            if width % block:
                padded[bits, block, width] = padded.get((bits, block, width), 0) + 1
    for (bits, block, width), count in padded.items():
        more = -width % block / width
        yield (
            f"{count} {bits}-bit products of width {width}, no multiple of {block}: the last block is filled with "
            f"zeros, {more:.0%} more bytes"
        )


def _name_layers(layers: list[int], num_layers: int) -> str:
    if len(layers) == num_layers:
        return "every layer"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
