"""Every fusion rule on graphs built by hand: where it fires, where it must not, and the check and value to blame."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from parity import TOLERANCES
from tiny_graphs import Feed, TinyGraph, count_ops, make_block, make_config, make_plan, run_graph

from graphport.export.clean_graph import clean_graph
from graphport.export.fuse_residual_norm import fuse_residual_norm
from graphport.export.fuse_silu import fuse_silu
from graphport.export.graph_pass import GraphPass, Miss, PassReport
from graphport.export.lower_attention import lower_attention
from graphport.export.lower_linear import lower_linear
from graphport.export.lower_norm import lower_norm
from graphport.export.pack_projections import pack_gate_up, pack_qkv

WIDTH = 8
SHAPE = ("batch", "time", WIDTH)
TOLERANCE = TOLERANCES["compiled", "float32"]
PLAN = make_plan(make_config())


def apply(rule: GraphPass, model: ir.Model, *, tolerance: float = TOLERANCE, plan: Any = PLAN) -> PassReport:
    """Run one pass; outputs keep their names and, within `tolerance`, their values."""
    random = np.random.default_rng(0)
    dims = {"batch": 2, "time": 3}
    feed = {
        value.name: random.standard_normal([d if isinstance(d, int) else dims[str(d)] for d in value.shape]).astype(
            "f4"
        )
        for value in model.graph.inputs
    }
    return apply_on(rule, model, feed, tolerance=tolerance, plan=plan)


def apply_on(rule: GraphPass, model: ir.Model, feed: Feed, *, tolerance: float, plan: Any = PLAN) -> PassReport:
    before = run_graph(model, feed)
    report = rule(model, plan)
    after = run_graph(model, feed)
    assert list(after) == list(before)
    for name, value in before.items():
        kept = ~np.isnan(value)
        assert np.abs(after[name][kept] - value[kept]).max() <= tolerance
    return report


def residual(norm: str = "RMSNorm", *, other: tuple[Any, ...] = SHAPE, axis: int = -1) -> tuple[TinyGraph, Any, Any]:
    graph = TinyGraph()
    total = graph.node("Add", graph.input("a", *SHAPE), graph.input("b", *other), shape=SHAPE)
    weight = graph.weight("blocks.1.norm.weight", WIDTH)
    if norm == "RMSNorm":
        normal = graph.node("RMSNorm", total, weight, domain="graphport", shape=SHAPE, epsilon=1e-5)
    else:
        normal = graph.node(norm, total, weight, shape=SHAPE, epsilon=1e-3, axis=axis)
    return graph, total, normal


@pytest.mark.parametrize(
    ("norm", "fused"),
    [("RMSNorm", "SkipSimplifiedLayerNormalization"), ("LayerNormalization", "SkipLayerNormalization")],
)
def test_residual_norm_fuses_add_and_norm(norm: str, fused: str) -> None:
    graph, _, normal = residual(norm)
    model = graph.build(y=normal)
    assert apply(fuse_residual_norm, model) == PassReport(rule="residual_norm", fused=("layer 1 norm",))
    assert count_ops(model) == {fused: 1}


def test_residual_norm_keeps_a_sum_that_is_read_elsewhere() -> None:
    graph, total, normal = residual()
    model = graph.build(y=normal, total=total, more=graph.node("Relu", total, shape=SHAPE))
    assert len(apply(fuse_residual_norm, model).fused) == 1
    assert count_ops(model) == {"SkipSimplifiedLayerNormalization": 1, "Relu": 1}


def test_residual_norm_leaves_a_valid_graph_when_the_sum_was_read_before_the_norm() -> None:
    graph = TinyGraph()
    total = graph.node("Add", graph.input("a", *SHAPE), graph.input("b", *SHAPE), shape=SHAPE)
    early = graph.node("Relu", total, shape=SHAPE)
    weight = graph.weight("norm.weight", WIDTH)
    normal = graph.node("RMSNorm", total, weight, domain="graphport", shape=SHAPE, epsilon=1e-5)
    assert len(apply(fuse_residual_norm, graph.build(y=normal, early=early)).fused) == 1


def test_residual_norm_fuses_a_sum_once_when_two_norms_read_it() -> None:
    graph, total, normal = residual()
    second = graph.node(
        "RMSNorm", total, graph.weight("other.weight", WIDTH), domain="graphport", shape=SHAPE, epsilon=1e-5
    )
    report = apply(fuse_residual_norm, graph.build(y=normal, z=second))
    assert report.fused == ("layer 1 norm",)
    assert report.missed[0].found == "SkipSimplifiedLayerNormalization"


@pytest.mark.parametrize(
    ("arguments", "check", "found"),
    [
        ({"other": (WIDTH,)}, "both addends have one shape", "[batch,time,8] and [8]"),
        ({"other": (1, "time", WIDTH)}, "both addends have one shape", "[batch,time,8] and [1,time,8]"),
        ({"norm": "LayerNormalization", "axis": 2}, None, None),
    ],
)
def test_residual_norm_leaves_a_broadcast_sum(arguments: Any, check: str | None, found: str | None) -> None:
    graph, _, normal = residual(**arguments)
    report = apply(fuse_residual_norm, graph.build(y=normal))
    wanted = () if check is None else (Miss(site="layer 1 norm", check=check, found=str(found)),)
    assert report.missed == wanted


def test_residual_norm_leaves_a_norm_over_several_axes() -> None:
    graph = TinyGraph()
    total = graph.node("Add", graph.input("a", 2, 3, WIDTH), graph.input("b", 2, 3, WIDTH), shape=(2, 3, WIDTH))
    normal = graph.node("LayerNormalization", total, graph.weight("w", 3, WIDTH), shape=(2, 3, WIDTH), axis=1)
    report = apply(fuse_residual_norm, graph.build(y=normal))
    assert report.missed == (Miss(site="w", check="the norm is over the last axis", found="axis 1"),)


def test_residual_norm_leaves_a_norm_without_sum() -> None:
    graph = TinyGraph()
    x = graph.node("Relu", graph.input("a", *SHAPE), shape=SHAPE)
    normal = graph.node("RMSNorm", x, graph.weight("final_norm.weight", WIDTH), domain="graphport", epsilon=1e-5)
    report = apply(fuse_residual_norm, graph.build(y=normal))
    assert report.missed == (Miss(site="final_norm", check="the norm's input is an Add", found="Relu"),)


def test_b69_residual_norm_leaves_mixed_types() -> None:
    graph = TinyGraph()
    half = ir.DataType.FLOAT16
    total = graph.node("Add", graph.input("a", *SHAPE, dtype=half), graph.input("b", *SHAPE, dtype=half), shape=SHAPE)
    total.dtype = half
    normal = graph.node("RMSNorm", total, graph.weight("w", WIDTH), domain="graphport", shape=SHAPE, epsilon=1e-5)
    (miss,) = fuse_residual_norm(graph.build(y=normal), PLAN).missed
    assert miss.check == "addends and weights have one type"
    assert miss.found == "FLOAT and FLOAT16"


def gated(
    *, one_input: bool = True, one_weight: bool = False, bias: Any = None, commuted: bool = False
) -> tuple[TinyGraph, Any, Any]:
    """silu(gate(x)) * up(x); `bias` holds the shapes of the two biases."""
    graph = TinyGraph()
    x = graph.input("x", *SHAPE)
    other = x if one_input else graph.input("z", *SHAPE)
    weights = [graph.weight(f"blocks.0.feed_forward.{name}.weight", 6, WIDTH) for name in ("gate", "up")]
    names = ("blocks.0.feed_forward.gate.bias", "blocks.0.feed_forward.up.bias")
    shapes = zip(names, bias or (None, None), strict=True)
    biases = [None if shape is None else graph.weight(name, *shape) for name, shape in shapes]
    gate = graph.linear(x, weights[0], biases[0])
    up = graph.linear(other, weights[0 if one_weight else 1], biases[1])
    active = graph.node("Mul", gate, graph.node("Sigmoid", gate), shape=gate.shape)
    product = graph.node("Mul", *((up, active) if commuted else (active, up)), shape=gate.shape)
    return graph, gate, product


@pytest.mark.parametrize("commuted", [False, True])
@pytest.mark.parametrize("bias", [None, ((6,), (6,))])
def test_gate_and_up_pack_bit_equal(bias: Any, commuted: bool) -> None:
    graph, _, product = gated(bias=bias, commuted=commuted)
    model = graph.build(y=product)
    assert apply(pack_gate_up, model, tolerance=0.0).fused == ("layer 0 feed_forward",)
    assert count_ops(model)["Linear"] == count_ops(model)["Split"] == 1
    assert apply(fuse_silu, model).fused == ("layer 0 feed_forward",)
    assert "Sigmoid" not in count_ops(model)


@pytest.mark.parametrize(
    ("arguments", "check", "found"),
    [
        ({"one_input": False}, "the linear layers read one input", '"x"'),
        ({"one_weight": True}, "every weight is a constant used once", "blocks.0.feed_forward.gate.weight has 2 uses"),
        ({"bias": ((6,), None)}, "all or none have a bias", r"[True, False]"),
        ({"bias": ((6,), (1,))}, "a bias has one value an output", "feed_forward.up.bias is [1] for 6"),
    ],
)
def test_gate_and_up_stay_apart(arguments: Any, check: str, found: str) -> None:
    graph, _, product = gated(**arguments)
    model = graph.build(y=product)
    report = apply(pack_gate_up, model, tolerance=0.0)
    (miss,) = report.missed
    assert (report.fused, miss.site, miss.check) == ((), "layer 0 feed_forward", check)
    assert found in miss.found
    assert count_ops(model)["Linear"] == 2


@pytest.mark.parametrize("bias", [None, ((6,), (6,))])
def test_b65_a_reused_preactivation_costs_no_second_product(bias: Any) -> None:
    graph, gate, product = gated(bias=bias)
    model = graph.build(y=product, again=graph.node("Relu", gate, shape=gate.shape), gate=gate)
    assert len(apply(pack_gate_up, model, tolerance=0.0).fused) == 1
    assert count_ops(model)["Linear"] == 1


def test_b65_a_product_read_besides_its_bias_is_not_computed_twice() -> None:
    graph = TinyGraph()
    x, sizes = graph.input("x", *SHAPE), ("batch", "time", 6)
    products = [
        graph.node("Linear", x, graph.weight(f"w{i}", 6, WIDTH), domain="graphport", shape=sizes) for i in (0, 1)
    ]
    gate, up = (graph.node("Add", p, graph.weight(f"b{i}", 6), shape=sizes) for i, p in enumerate(products))
    model = graph.build(y=graph.node("Mul", graph.node("Relu", gate, shape=sizes), up, shape=sizes), raw=products[0])
    report = apply(pack_gate_up, model, tolerance=0.0)
    assert report.missed[0].check == "a product is read by its bias alone"
    assert count_ops(model)["Linear"] == 2


def silu(kind: str) -> ir.Model:
    graph = TinyGraph()
    x, z = graph.input("x", *SHAPE), graph.input("z", *SHAPE)
    sigmoid = graph.node("Sigmoid", z if kind == "other" else x, shape=SHAPE)
    product = graph.node("Mul", *((sigmoid, x) if kind == "commuted" else (x, sigmoid)), shape=SHAPE)
    extra = {"also": sigmoid} if kind == "output" else {}
    if kind == "twice":
        extra = {"also": graph.node("Neg", sigmoid, shape=SHAPE)}
    return graph.build(y=product, **extra)


@pytest.mark.parametrize("kind", ["plain", "commuted", "output"])
def test_silu_fuses(kind: str) -> None:
    model = silu(kind)
    assert len(apply(fuse_silu, model).fused) == 1
    wanted = {"QuickGelu": 1} | ({"Sigmoid": 1} if kind == "output" else {})
    assert count_ops(model) == wanted


@pytest.mark.parametrize(("kind", "found"), [("other", "Mul"), ("twice", "Mul, Neg")])
def test_silu_leaves_another_sigmoid(kind: str, found: str) -> None:
    model = silu(kind)
    report = apply(fuse_silu, model, tolerance=0.0)
    assert [(m.check, m.found) for m in report.missed] == [("the sigmoid multiplies its own input", found)]
    assert "QuickGelu" not in count_ops(model)


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
