"""Layers with a sliding window get caches of their own length: those that serve the graph keep no more than the window.

Before: GroupQueryAttention(qkv, ..., seqlens_k, total, cos, sin)
After:  GroupQueryAttention(qkv, ..., window_seqlens_k, window_total, cos, sin, Positions(input_ids, seqlens_k))

The kernel takes a row's tokens for those that lie in its cache, and rotates the new ones at the places given. It moves
no rows itself (its attribute sliding_window_cache would): who owns the cache does, see `model_def/window_rows.py`.
"""

import onnx_ir as ir

from graphport.export.function_bodies import attach_function
from graphport.export.graph_pass import CompilePlan, Miss, PassReport, new_node
from graphport.export.portable_ops import DOMAIN
from graphport.model_def.signature import (
    INPUT_IDS,
    LOGITS_ROWS,
    SEQLENS_K,
    WINDOW_CAPACITY,
    WINDOW_SEQLENS_K,
    WINDOW_TOTAL_SEQUENCE_LENGTH,
    past_key,
    past_value,
)
from graphport.model_def.window_rows import moving_layers

RULE = "window_cache"

_SEQLENS, _TOTAL, _POSITIONS = 5, 6, 9  # inputs of GroupQueryAttention


def window_layers(plan: CompilePlan) -> tuple[int, ...]:
    """Layers that get such caches: those that would drop rows, and whose attention is the target's kernel."""
    if not plan.target.moves_rows or not plan.config.is_decoder or {RULE, "attention"} & set(plan.disabled):
        return ()
    blocks, moving = plan.config.blocks, moving_layers(plan.config, plan.max_length)
    return tuple(layer for layer in moving if plan.target.attention_limit(blocks[layer].attention) is None)


def window_caches(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Give the attentions of `window_layers` their lengths apart; of others that would drop rows, say why not."""
    layers = window_layers(plan)
    missed = _missed(plan, layers)
    if not layers:
        return PassReport(rule=RULE, missed=missed)
    inputs = {str(value.name): value for value in model.graph.inputs}
    seqlens, total = _add_lengths(model.graph)
    positions: ir.Value | None = None
    fused = []
    for layer in layers:
        past = inputs[past_key(layer)], inputs[past_value(layer)]
        kernel = next((use.node for use in past[0].uses() if use.node.op_type == "GroupQueryAttention"), None)
        if kernel is None:
            missed += (Miss(site=f"layer {layer} attention", check="one kernel attends", found="none"),)
            continue
        if kernel.attributes.get_int("do_rotary", 0):
            positions = positions or _add_positions(model, kernel, inputs)
            kernel.resize_inputs(max(len(kernel.inputs), _POSITIONS + 1))
            kernel.replace_input_with(_POSITIONS, positions)
        kernel.replace_input_with(_SEQLENS, seqlens)
        kernel.replace_input_with(_TOTAL, total)
        for value in (*past, *kernel.outputs[1:]):
            _name_capacity(value)
        fused.append(f"layer {layer} attention")
    return PassReport(rule=RULE, fused=tuple(fused), missed=missed)


def _missed(plan: CompilePlan, layers: tuple[int, ...]) -> tuple[Miss, ...]:
    """Layers that would drop rows and keep them; where a target has no such caches there is nothing to miss."""
    if not plan.target.moves_rows or not plan.config.is_decoder:
        return ()
    return tuple(
        Miss(
            site=f"layer {layer} attention",
            check="GroupQueryAttention attends",
            found=plan.target.attention_limit(plan.config.blocks[layer].attention) or "standard ops, as asked for",
        )
        for layer in moving_layers(plan.config, plan.max_length)
        if layer not in layers
    )


def _add_lengths(graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
    """The two counts, as inputs behind `logits_rows`."""
    integer = ir.TensorType(ir.DataType.INT32)
    seqlens = ir.Value(name=WINDOW_SEQLENS_K, type=integer, shape=ir.Shape(["batch"]))
    total = ir.Value(name=WINDOW_TOTAL_SEQUENCE_LENGTH, type=integer, shape=ir.Shape([]))
    place = [value.name for value in graph.inputs].index(LOGITS_ROWS) + 1
    graph.inputs[place:place] = [seqlens, total]
    return seqlens, total


def _add_positions(model: ir.Model, before: ir.Node, inputs: dict[str, ir.Value]) -> ir.Value:
    """Places in the text [B, S], for all layers."""
    attach_function(model, "Positions")
    operands: list[ir.Value | None] = [inputs[INPUT_IDS], inputs[SEQLENS_K]]
    positions = new_node(before, "Positions", operands, domain=DOMAIN, name="window_positions").outputs[0]
    positions.dtype, positions.shape = ir.DataType.INT64, ir.Shape(["batch", "sequence"])
    return positions


def _name_capacity(value: ir.Value) -> None:
    if value.shape is not None:
        rows, heads, _, width = value.shape
        value.shape = ir.Shape([rows, heads, WINDOW_CAPACITY, width])
