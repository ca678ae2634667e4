"""Every fusion rule on graphs built by hand: where it fires, where it must not, and the check and value to blame."""

from typing import Any

import onnx_ir as ir
import pytest
from one_rule import PLAN, SHAPE, WIDTH, apply
from tiny_graphs import TinyGraph, count_ops

from graphport.export.fuse_residual_norm import fuse_residual_norm
from graphport.export.fuse_silu import fuse_silu
from graphport.export.graph_pass import Miss, PassReport
from graphport.export.pack_projections import pack_gate_up


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
