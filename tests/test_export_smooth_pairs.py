"""Smoothing between what makes an activation and the linear layer that reads it, and what is left alone."""

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from tiny_graphs import (
    TinyGraph,
    make_config,
    make_plan,
    run_graph,
)

from graphport.export.calibrate import Ranges
from graphport.export.graph_pass import Miss, PassReport
from graphport.export.smooth_activations import smooth_activations
from graphport.export.targets import WEIGHT_BLOCK

WIDTH = 40  # one whole block of 32 and a part of one
PLAIN = "the activation is made by a norm or a linear layer"
ALONE = "linear layers alone read the activation"


def maker_and_linear(
    kind: str, *, bias: tuple[int, ...] | None = None, width: int = WIDTH, twice: str = ""
) -> tuple[ir.Model, tuple[str, ...], str]:
    """A graph x -> maker -> linear; the names of the maker's constants, and of the linear layer's weight.

    `twice` is what something else reads too: "activation", "product", "made", "weight" or "maker".
    """
    graph, names = TinyGraph(), ["blocks.0.maker.weight"]
    x = graph.input("x", "batch", "time", 24 if kind in ("relu", "gated", "gelu") else width)
    shape = ("batch", "time", width)
    extra: dict[str, Any] = {}
    if kind in ("RMSNorm", "LayerNormalization"):
        constants = [graph.weight(names[0], width)]
        if bias is not None:
            constants.append(graph.weight("blocks.0.maker.bias", *bias))
        domain = "graphport" if kind == "RMSNorm" else ""
        made = graph.node(kind, x, *constants, domain=domain, shape=shape, epsilon=1e-5)
        names = [value.name for value in constants]
        if twice == "maker":
            extra["other"] = graph.node("Mul", x, constants[0], shape=shape)
    else:
        weight = graph.weight(names[0], width, 24)
        product = made = graph.node("Linear", x, weight, shape=shape, domain="graphport")
        if bias is not None:
            names.append("blocks.0.maker.bias")
            made = graph.node("Add", product, graph.weight(names[1], *bias), shape=shape)
        if twice == "product":
            extra["other"] = graph.node("Neg", product, shape=shape)
        if twice == "made":
            extra["other"] = made
        if kind == "gated":
            gate = graph.node("Linear", x, graph.weight("gate", width, 24), shape=shape, domain="graphport")
            made = graph.node("Mul", graph.node("Tanh", gate, shape=shape), made, shape=shape)
        else:
            made = graph.node({"relu": "Relu", "gelu": "Gelu"}[kind], made, shape=shape)
    if twice == "activation":
        extra["other"] = graph.node("Neg", made, shape=shape)
    if twice == "output":
        extra["other"] = made
    name = "blocks.0.reader.weight"
    weight = graph.weight(name, 7, width)
    y = graph.node("Linear", made, weight, shape=("batch", "time", 7), domain="graphport")
    if twice == "weight":
        extra["other"] = graph.node("Neg", weight, shape=(7, width))
    return graph.build(y=y, **extra), tuple(names), name


def apply(model: ir.Model, ranges: Ranges) -> PassReport:
    """Run the pass; every output keeps its values."""
    width = model.graph.inputs[0].shape
    assert width is not None
    feed = {"x": np.random.default_rng(0).standard_normal((2, 3, int(width[2]))).astype(np.float32)}
    before = run_graph(model, feed)
    report = smooth_activations(model, dataclasses.replace(make_plan(make_config()), activation_ranges=ranges))
    after = run_graph(model, feed)
    for output, value in before.items():
        assert np.abs(after[output] - value).max() <= 2e-5 * max(1, np.abs(value).max())
    return report


def constant(model: ir.Model, name: str) -> NDArray[np.float32]:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor.numpy().copy()


def ranges_of(width: int = WIDTH) -> NDArray[np.float32]:
    return (10 ** np.random.default_rng(3).uniform(-3, 3, width)).astype(np.float32)


KINDS = [
    ("RMSNorm", None),
    ("LayerNormalization", None),
    ("LayerNormalization", (WIDTH,)),
    ("relu", None),
    ("relu", (WIDTH,)),
    ("gated", None),
    ("gated", (WIDTH,)),
]


@pytest.mark.parametrize(("kind", "bias"), KINDS)
def test_every_maker_is_divided_by_what_its_reader_is_multiplied_by(kind: str, bias: tuple[int, ...] | None) -> None:
    model, makers, reader = maker_and_linear(kind, bias=bias)
    before = {name: constant(model, name) for name in (*makers, reader)}
    ranges = ranges_of()
    report = apply(model, {reader: ranges})
    assert report == PassReport(rule="smoothed", fused=("layer 0 reader",))
    factors = constant(model, reader)[0] / before[reader][0]
    for name in makers:
        rows = before[name] / constant(model, name)
        assert np.allclose(rows if rows.ndim == 1 else rows[:, 0], factors, rtol=1e-5)
    for start in range(0, WIDTH, WEIGHT_BLOCK):  # geometric mean 1, ratios the square roots of the ranges'
        block = slice(start, start + WEIGHT_BLOCK)
        assert np.abs(np.log(factors[block]).mean()) < 1e-5
        ratio = factors[block] / np.sqrt(ranges[block])
        assert np.allclose(ratio, ratio[0], rtol=1e-4)
    assert factors.max() / factors.min() > 10


@pytest.mark.parametrize("head_dim", [16, 32, 64])
@pytest.mark.parametrize("group", [1, 3])
def test_query_heads_of_one_value_head_share_its_factors(head_dim: int, group: int) -> None:
    kv, heads = 2, 2 * group
    graph = TinyGraph()
    x = graph.input("x", "batch", "time", 24)
    widths = {"query": heads * head_dim, "key": kv * head_dim, "value": kv * head_dim}
    weights = {name: graph.weight(f"blocks.0.attention.{name}.weight", width, 24) for name, width in widths.items()}
    parts = [graph.linear(x, weight) for weight in weights.values()]
    parts[2] = graph.node("Add", parts[2], graph.weight("blocks.0.attention.value.bias", kv * head_dim), shape=(1,))
    caches = [graph.input(f"past_key_values.0.{name}", "batch", kv, 9, head_dim) for name in ("key", "value")]
    counts = [graph.input(name, *dims, dtype=ir.DataType.INT32) for name, dims in (("seqlens_k", ["batch"]), ("n", []))]
    options = {"num_heads": heads, "kv_num_heads": kv, "scale": 0.3, "softcap": 0.0, "local_window_size": -1}
    out = graph.node("CachedAttention", *parts, *caches, *counts, domain="graphport", num_outputs=3, **options)[0]
    out.shape = ir.Shape(["batch", "time", heads * head_dim])
    model = graph.build(y=graph.linear(out, graph.weight("blocks.0.attention.output.weight", 7, heads * head_dim)))
    random = np.random.default_rng(0)
    feed = {"x": random.standard_normal((2, 3, 24)).astype(np.float32)}
    feed |= {value.name or "": np.zeros((2, kv, 9, head_dim), np.float32) for value in caches}
    feed |= {"seqlens_k": np.array([2, 2], np.int32), "n": np.array(3, np.int32)}
    names = ("blocks.0.attention.output.weight", "blocks.0.attention.value.weight", "blocks.0.attention.value.bias")
    before, wanted = [constant(model, name) for name in names], run_graph(model, feed)["y"]
    ranges = ranges_of(heads * head_dim)
    plan = dataclasses.replace(make_plan(make_config()), activation_ranges={names[0]: ranges})
    assert smooth_activations(model, plan).fused == ("layer 0 attention.output",)
    assert np.abs(run_graph(model, feed)["y"] - wanted).max() <= 1e-4 * np.abs(wanted).max()
    output, value, bias = (constant(model, name) for name in names)
    channels = (output[0] / before[0][0]).reshape(kv, group, head_dim)
    assert np.allclose(channels, channels[:, :1], rtol=1e-5)
    rows = (before[1] / value)[:, 0]
    assert np.allclose(rows, channels[:, 0].ravel(), rtol=1e-5)
    assert np.allclose(before[2] / bias, rows, rtol=1e-5)
    for start in range(0, kv * head_dim, WEIGHT_BLOCK):
        assert np.abs(np.log(rows[start : start + WEIGHT_BLOCK]).mean()) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "check", "found"),
    [
        ({"kind": "gelu"}, PLAIN, "Gelu"),
        ({"kind": "RMSNorm", "twice": "activation"}, ALONE, "2 readers, 1 linear layers"),
        ({"kind": "relu", "twice": "output"}, ALONE, "1 readers, 1 linear layers"),
        ({"kind": "RMSNorm", "twice": "maker"}, "every weight is a constant used once", "maker.weight has 2 uses"),
        ({"kind": "RMSNorm", "twice": "weight"}, "every weight is a constant used once", "reader.weight has 2 uses"),
        ({"kind": "relu", "twice": "made"}, "what makes the activation is read once", "has other readers"),
        ({"kind": "gated", "twice": "made"}, "what makes the activation is read once", "has other readers"),
        (
            {"kind": "gated", "twice": "product", "bias": (WIDTH,)},
            "what makes the activation is read once",
            "has other readers",
        ),
        ({"kind": "relu", "bias": (1,)}, "a bias has one value an output", "maker.bias is [1] for 40"),
    ],
)
def test_what_something_else_reads_is_left_alone_with_the_reason(
    arguments: dict[str, Any], check: str, found: str
) -> None:
    model, makers, reader = maker_and_linear(**arguments)
    before = [constant(model, name) for name in (*makers, reader)]
    (miss,) = apply(model, {reader: ranges_of()}).missed
    assert (miss.site, miss.check) == ("layer 0 reader", check)
    assert found in miss.found
    for name, value in zip((*makers, reader), before, strict=True):
        assert np.array_equal(constant(model, name), value)


def test_an_activation_that_is_a_graph_input_is_left_alone() -> None:
    graph = TinyGraph()
    weight = graph.weight("blocks.0.reader.weight", 7, WIDTH)
    model = graph.build(y=graph.linear(graph.input("x", "batch", "time", WIDTH), weight))
    report = apply(model, {"blocks.0.reader.weight": ranges_of()})
    assert report.missed == (Miss(site="layer 0 reader", check=PLAIN, found="a graph input"),)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_ranges_that_are_not_finite_are_left_alone(value: float) -> None:
    model, _, reader = maker_and_linear("RMSNorm")
    ranges = ranges_of()
    ranges[3] = value
    report = apply(model, {reader: ranges})
    assert report.missed == (
        Miss(site="layer 0 reader", check="activation ranges are finite", found="1 of 40 are not"),
    )


def test_channels_that_are_never_used_keep_finite_factors() -> None:
    model, makers, reader = maker_and_linear("RMSNorm")
    before = constant(model, reader)
    assert apply(model, {reader: np.zeros(WIDTH, np.float32)}).fused == ("layer 0 reader",)
    assert np.array_equal(constant(model, reader), before)
    ranges = np.zeros(WIDTH, np.float32)
    ranges[[2, 35]] = 1e30, 1e-30
    apply(model, {reader: ranges})
    for name in (*makers, reader):
        assert np.isfinite(constant(model, name)).all()
    factors = constant(model, reader)[0] / before[0]
    assert factors[2] / factors[3] == pytest.approx(1e3, rel=1e-3)  # a dead channel counts as a millionth
