"""The rules that make attention, norms and linear layers kernels: where they fire, where not, and what to blame."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from one_rule import PLAN, SHAPE, TOLERANCE, WIDTH, apply, apply_on
from tiny_graphs import Feed, TinyGraph, count_ops, make_block, make_config, make_plan

from graphport.export.clean_graph import clean_graph
from graphport.export.graph_pass import PassReport
from graphport.export.lower_attention import lower_attention
from graphport.export.lower_linear import lower_linear
from graphport.export.lower_norm import lower_norm
from graphport.export.pack_projections import pack_qkv


def attention(
    heads: int = 4, kv: int = 2, size: int = 16, *, rotary: int = 0, bias: bool = False, inputs: int = 1
) -> tuple[ir.Model, Feed]:
    """Three projections, attention over a cache of 7, and a step of one token after 4 and 2."""
    graph, hidden = TinyGraph(), ("batch", "time", WIDTH)
    names = ("query", "key", "value")
    x = [graph.input(f"x{i}", *hidden) for i in range(inputs)]
    parts = []
    for index, (name, width) in enumerate(zip(names, (heads * size, kv * size, kv * size), strict=True)):
        added = graph.weight(f"blocks.0.attention.{name}.bias", width) if bias else None
        weight = graph.weight(f"blocks.0.attention.{name}.weight", width, WIDTH)
        parts.append(graph.linear(x[index % inputs], weight, added))
    caches = [graph.input(f"past_key_values.0.{name}", "batch", kv, 7, size) for name in ("key", "value")]
    counts = [
        graph.input("seqlens_k", "batch", dtype=ir.DataType.INT32),
        graph.input("total", dtype=ir.DataType.INT32),
    ]
    options = {"num_heads": heads, "kv_num_heads": kv, "scale": 0.3, "softcap": 0.0, "local_window_size": -1}
    tables = []
    if rotary:
        angles = np.arange(9.0)[:, None] * 10.0 ** -np.arange(rotary // 2)
        tables = [graph.weight(n, values=f(angles).astype("f4")) for n, f in (("cos", np.cos), ("sin", np.sin))]
        options["rotary_interleaved"] = 0
    op_type = "RotaryCachedAttention" if rotary else "CachedAttention"
    out, *present = graph.node(op_type, *parts, *caches, *counts, *tables, domain="graphport", num_outputs=3, **options)
    random = np.random.default_rng(0)
    feed: Feed = {f"x{i}": random.standard_normal((2, 1, WIDTH)).astype("f4") for i in range(inputs)}
    for value in caches:
        cache = random.standard_normal((2, kv, 7, size)).astype("f4")
        cache[0, :, 4:], cache[1, :, 2:] = np.nan, np.nan  # what lies beyond the text is unspecified
        feed[value.name or ""] = cache
    feed |= {"seqlens_k": np.array([4, 2], np.int32), "total": np.array(5, np.int32)}
    return graph.build(y=out, present_key=present[0], present_value=present[1]), feed


def attention_plan(heads: int = 4, kv: int = 2, size: int = 16) -> Any:
    block = make_block({"num_heads": heads, "num_kv_heads": kv, "head_dim": size, "rotary": None})
    return make_plan(make_config(block))


@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_b34_qkv_of_different_widths_pack_and_lower(kv: int, bias: bool) -> None:
    model, feed = attention(kv=kv, rotary=16, bias=bias)
    assert apply_on(pack_qkv, model, feed, tolerance=0.0).fused == ("layer 0 attention",)
    assert count_ops(model)["Linear"] == 1
    weight = model.graph.initializers["blocks.0.attention.query_key_value.weight"]
    assert tuple(weight.shape or ()) == ((4 + 2 * kv) * 16, WIDTH)
    report = apply_on(lower_attention, model, feed, tolerance=TOLERANCE, plan=attention_plan(kv=kv))
    assert report == PassReport(rule="attention", fused=("layer 0 attention",))
    kernel = next(node for node in model.graph if node.op_type == "GroupQueryAttention")
    assert [value is None for value in kernel.inputs[:3]] == [False, True, True]
    assert "Split" not in count_ops(model)


def test_qkv_of_different_inputs_stay_apart() -> None:
    model, feed = attention(inputs=2)
    (miss,) = apply_on(pack_qkv, model, feed, tolerance=0.0).missed
    assert (miss.site, miss.check) == ("layer 0 attention", "the linear layers read one input")
    assert "x0" in miss.found
    assert "x1" in miss.found


@pytest.mark.parametrize(
    ("size", "rotary", "site", "found"),
    [
        (12, 0, "layer 0 attention", "head_dim 12 is no multiple of 8"),
        (8, 8, "layer 0 attention rotary", "head_dim 8 is no multiple of 16"),
        (16, 8, "layer 0 attention rotary", "rotary width 8 is no multiple of 16"),
    ],
)
def test_attention_that_the_kernel_cannot_take_says_so(size: int, rotary: int, site: str, found: str) -> None:
    model, feed = attention(size=size, rotary=rotary)
    report = apply_on(lower_attention, model, feed, tolerance=TOLERANCE, plan=attention_plan(size=size))
    assert [(miss.site, miss.found) for miss in report.missed] == [(site, found)]
    assert count_ops(model).get("RotaryEmbedding", 0) == (2 if rotary else 0)
    assert count_ops(model).get("GroupQueryAttention", 0) == (0 if size == 12 else 1)


@pytest.mark.parametrize(("heads", "kv", "size"), [(8, 2, 16), (3, 1, 16), (4, 4, 16), (4, 2, 8)])
def test_b33_head_counts_unlike_the_graphs_are_not_lowered(heads: int, kv: int, size: int) -> None:
    model, feed = attention()
    report = apply_on(lower_attention, model, feed, tolerance=0.0, plan=attention_plan(heads, kv, size))
    (miss,) = report.missed
    assert miss.check == "head counts and size of graph and config agree"
    assert miss.found == (
        f"4 query and 2 kv heads of 16 in the graph, {heads} query and {kv} kv heads of {size} in the config"
    )


def test_a_split_in_another_order_is_not_read_as_packed() -> None:
    model, feed = attention(kv=4)
    pack_qkv(model, PLAN)
    node = next(n for n in model.graph if n.op_type == "CachedAttention")
    query, key = node.inputs[:2]
    node.replace_input_with(0, key)
    node.replace_input_with(1, query)
    apply_on(lower_attention, model, feed, tolerance=TOLERANCE, plan=attention_plan(kv=4))
    kernel = next(n for n in model.graph if n.op_type == "GroupQueryAttention")
    assert all(value is not None for value in kernel.inputs[:3])


def test_a_norm_is_lowered_where_no_residual_is() -> None:
    graph = TinyGraph()
    weight = graph.weight("final_norm.weight", WIDTH)
    model = graph.build(y=graph.node("RMSNorm", graph.input("x", *SHAPE), weight, domain="graphport", epsilon=0.1))
    assert apply(lower_norm, model).fused == ("final_norm",)
    assert count_ops(model) == {"SimplifiedLayerNormalization": 1}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_computed_weight_is_lowered_without_copy_and_reported(precision: str) -> None:
    graph = TinyGraph()
    weight = graph.node("Relu", graph.input("w", 6, WIDTH), shape=(6, WIDTH))
    model = graph.build(y=graph.linear(graph.input("x", *SHAPE), weight))
    report = apply(lower_linear, model, plan=make_plan(make_config(), precision))
    assert count_ops(model) == {"Relu": 1, "Transpose": 1, "MatMul": 1}
    assert [miss.check for miss in report.missed] == ([] if precision == "fp32" else ["the weight is a constant"])


def test_clean_keeps_the_name_of_a_weight_that_folds() -> None:
    graph = TinyGraph()
    one = graph.node("Constant", value=ir.tensor(np.float32(1)))
    weight = graph.node("Add", graph.weight("blocks.0.norm.weight", WIDTH), one, shape=(WIDTH,))
    model = graph.build(y=graph.node("Mul", graph.input("x", *SHAPE), weight, shape=SHAPE))
    apply(clean_graph, model, tolerance=0.0)
    assert list(model.graph.initializers) == ["blocks.0.norm.weight"]
    assert count_ops(model) == {"Mul": 1}
