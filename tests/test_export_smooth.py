"""Smoothing before 8-bit rounding: where it happens, that it changes no function, and that it helps where it should."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from tiny_graphs import (
    CAPACITY,
    CONFIGS,
    MAX_LENGTH,
    decoder_feed,
    eager_step,
    exported,
    interface,
    make_plan,
    run_graph,
    save_and_open,
    tiny_model,
)
from torch import nn

import graphport.export.model_export as export_module
import graphport.export.smooth_activations as smooth_module
from graphport.export.calibrate import Ranges, activation_ranges
from graphport.export.calibration_text import CALIBRATION_TEXT
from graphport.export.certify import certify_stages, eager_logits
from graphport.export.clean_graph import clean_graph
from graphport.export.graph_pass import CompilePlan, Miss, PassReport
from graphport.export.graph_runner import GraphRunner
from graphport.export.model_export import export
from graphport.export.parity import TOLERANCES, ParityError, require_passed
from graphport.export.pipeline import compile_graph, count_fusions
from graphport.export.smooth_activations import smooth_activations
from graphport.export.source import SourceModel
from graphport.model_def.parity_text import PARITY_TEXT
from graphport.model_def.signature import GRAPH_FILE, GenerationDefaults

TOLERANCE = TOLERANCES["compiled", "max_abs"]


def wide_ranges(name: str, seed: int = 0) -> Ranges:
    """Random ranges over four powers of ten for every linear layer of CONFIGS[name]; a fifth of the channels dead."""
    random = np.random.default_rng(seed)
    ranges: Ranges = {}
    for path, module in tiny_model(name).named_modules():
        if isinstance(module, nn.Linear):
            sizes = 10.0 ** random.uniform(-2, 2, module.in_features) * (random.random(module.in_features) > 0.2)
            ranges[f"{path}.weight"] = sizes.astype(np.float32)
    return ranges


def random_ids(length: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(61, size=length)]


def plan_for(name: str, precision: str = "fp32", ranges: Ranges | None = None) -> CompilePlan:
    plan = make_plan(CONFIGS[name], precision)
    return dataclasses.replace(plan, activation_ranges=wide_ranges(name) if ranges is None else ranges)


QKV, OUTPUT, UP, DOWN = "attention.query", "attention.output", "feed_forward.up", "feed_forward.down"
PLAIN = "the activation is made by a norm or a linear layer"
ALONE = "linear layers alone read the activation"

# What is smoothed in each layer, and what is left with its reason.
SMOOTHED: dict[str, tuple[tuple[str, ...], ...]] = {
    "llama": ((QKV, OUTPUT, UP, DOWN),) * 2,
    "gpt": ((QKV, OUTPUT, UP),) * 2,
    "gemma": ((QKV, OUTPUT, UP, DOWN),) * 2,
    "post": ((OUTPUT, DOWN),) * 2,
    "mixed": ((QKV, OUTPUT, UP, DOWN), (OUTPUT, DOWN), (QKV, OUTPUT, UP)),
}
LEFT: dict[str, set[tuple[str, str, str]]] = {
    "llama": set(),
    "gpt": {(f"layer {layer} {DOWN}", PLAIN, "Gelu") for layer in (0, 1)},
    "gemma": set(),
    "post": {
        (f"layer 0 {QKV}", PLAIN, "Add"),
        (f"layer 0 {UP}", ALONE, "3 readers, 2 linear layers"),
        (f"layer 1 {QKV}", ALONE, "4 readers, 3 linear layers"),
        (f"layer 1 {UP}", ALONE, "3 readers, 2 linear layers"),
    },
    "mixed": {
        (f"layer 1 {QKV}", PLAIN, "Add"),
        (f"layer 1 {UP}", ALONE, "3 readers, 2 linear layers"),
        (f"layer 2 {DOWN}", PLAIN, "Mul"),
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_block_is_smoothed_where_its_function_allows(name: str) -> None:
    model = exported(name)
    clean_graph(model)
    before, nodes = interface(model), [node.op_type for node in model.graph]
    report = smooth_activations(model, plan_for(name))
    assert report.rule == "smoothed"
    assert report.fused == tuple(f"layer {i} {part}" for i, parts in enumerate(SMOOTHED[name]) for part in parts)
    assert {(miss.site, miss.check, miss.found) for miss in report.missed} == LEFT[name]
    assert interface(model) == before
    assert [node.op_type for node in model.graph] == nodes


@pytest.mark.parametrize("name", CONFIGS)
def test_a_smoothed_fp32_graph_computes_what_eager_computes(name: str, tmp_path: Path) -> None:
    """Biases, kv groups of 1, 2 and 4, q/k norms; widths of 40 and 48, which are no multiple of 32."""
    model, ids = exported(name), random_ids(40)
    reports = compile_graph(model, plan_for(name))
    assert count_fusions(reports)["smoothed"] == sum(map(len, SMOOTHED[name]))
    save_and_open(model, tmp_path)
    runner, eager = GraphRunner(tmp_path / GRAPH_FILE, CONFIGS[name]), eager_logits(tiny_model(name), ids)
    for chunks in ((), (7, 1, 1)):  # smoothed values come back from the cache
        assert np.abs(runner.logits(ids, chunks=chunks) - eager).max() <= TOLERANCE


def _one_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smooth_module, "_dividing", lambda _: lambda rows: rows)


def _other_side_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smooth_module, "_multiplying", lambda _: lambda matrix: matrix)


def _wrong_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smooth_module, "_multiplying", lambda factors: lambda matrix: matrix / factors)


def _heads_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    right = smooth_module._factors

    def wrong(ranges: Any, maker: Any) -> Any:
        rows, channels = right(ranges, maker)
        return rows, channels if maker.shared_by == 1 else np.tile(rows, maker.shared_by)

    monkeypatch.setattr(smooth_module, "_factors", wrong)


@pytest.mark.parametrize("fault", [_one_side_only, _other_side_only, _wrong_way_round, _heads_in_another_order])
def test_factors_applied_wrongly_are_rejected(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, eager = random_ids(MAX_LENGTH), tiny_model("llama")

    def certify() -> Any:
        plan = plan_for("llama", "int8")
        reference = eager_logits(eager, ids)
        return certify_stages(exported("llama"), plan, ids, reference, folder=tmp_path / "out", observe=lambda _: None)

    require_passed(certify())
    fault(monkeypatch)
    checks = certify()
    assert [check.passed for check in checks] == [True, False, False, False]
    with pytest.raises(ParityError, match=r"3 of 4 parity checks failed. compiled: "):
        require_passed(checks)


def add_outliers(model: ir.Model, ranges: Ranges, *, size: float) -> Ranges:
    """Make four channels of every norm `size` times as large and their columns as much smaller: an equal function."""
    factors = np.ones(CONFIGS["llama"].hidden_size, np.float32)
    factors[[1, 12, 33, 40]] = size
    clean_graph(model)
    changed = dict(ranges)
    readers = {"attention_norm": ("attention.query", "attention.key", "attention.value")}
    readers["feed_forward_norm"] = ("feed_forward.gate", "feed_forward.up")
    for layer in range(CONFIGS["llama"].num_layers):
        for norm, linears in readers.items():
            scale(model, f"blocks.{layer}.{norm}.weight", factors)
            for linear in linears:
                scale(model, f"blocks.{layer}.{linear}.weight", 1 / factors)
                changed[f"blocks.{layer}.{linear}.weight"] = ranges[f"blocks.{layer}.{linear}.weight"] * factors
    return changed


def scale(model: ir.Model, name: str, factors: NDArray[np.float32]) -> None:
    value = model.graph.initializers[name]
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() * factors, name=name)


def test_smoothing_takes_the_error_out_of_channels_that_stand_out() -> None:
    """8-bit activations (accuracy level 4) lose what shares a block with a large channel."""
    eager, feed = tiny_model("llama"), decoder_feed(CONFIGS["llama"], (0,), CAPACITY)
    measured = activation_ranges(eager, [random_ids(60, seed=5)])
    wanted = eager_step(eager, feed)["logits"]
    errors: dict[tuple[float, bool], float] = {}
    for size in (1.0, 60.0):
        for is_smoothed in (False, True):
            model = exported("llama")
            ranges = add_outliers(model, measured, size=size)
            compile_graph(model, plan_for("llama", "int8", ranges if is_smoothed else {}))
            levels = {n.attributes["accuracy_level"].as_int() for n in model.graph if n.op_type == "MatMulNBits"}
            assert levels == {4}
            errors[size, is_smoothed] = float(np.abs(run_graph(model, feed)["logits"] - wanted).mean())
    assert errors[60, False] > 3 * errors[1, False]  # the outliers do harm
    assert errors[60, True] < 0.4 * errors[60, False]  # measured: 0.051 plain, 0.55 with outliers, 0.12 smoothed
    assert errors[1, True] < 1.3 * errors[1, False]  # and without outliers smoothing does none


def test_a_layer_without_ranges_is_no_candidate_and_a_group_with_some_is_left_alone() -> None:
    model = exported("llama")
    clean_graph(model)
    assert smooth_activations(model, plan_for("llama", "int8", {})) == PassReport(rule="smoothed")
    ranges = {
        name: values for name, values in wide_ranges("llama").items() if not name.endswith("0.attention.key.weight")
    }
    report = smooth_activations(model, plan_for("llama", "int8", ranges))
    check = "every linear layer has an activation range"
    assert report.missed == (Miss(site=f"layer 0 {QKV}", check=check, found="2 of 3 have one"),)
    assert len(report.fused) == 7


def test_the_tied_head_is_left_as_it_is() -> None:
    model = exported("llama")
    clean_graph(model)
    table = model.graph.initializers["embedding.weight"].const_value
    norm = model.graph.initializers["final_norm.weight"].const_value
    ranges = wide_ranges("llama") | {
        "embedding.weight": (10 ** np.random.default_rng(3).uniform(-3, 3, 48)).astype(np.float32)
    }
    report = smooth_activations(model, plan_for("llama", "int8", ranges))
    assert [miss.site for miss in report.missed] == ["embedding"]
    assert model.graph.initializers["embedding.weight"].const_value is table
    assert model.graph.initializers["final_norm.weight"].const_value is norm


def test_ranges_are_the_largest_magnitudes_over_the_text_its_first_token_included() -> None:
    model, ids = tiny_model("gpt"), random_ids(20)
    inputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, given: inputs.update({name: given[0][0].detach()})

    watched = {f"{name}.weight": part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    hooks = [part.register_forward_pre_hook(keep(name)) for name, part in watched.items()]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    ranges = activation_ranges(model, [ids])
    assert set(ranges) == set(watched)
    for name, values in ranges.items():
        assert values.dtype == np.float32
        assert np.array_equal(values, inputs[name].abs().max(dim=0).values.numpy())
    assert any((values > inputs[name][1:].abs().max(dim=0).values.numpy()).any() for name, values in ranges.items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in watched.values())


def test_hooks_are_removed_when_the_model_fails() -> None:
    model = tiny_model("gpt")
    with pytest.raises(IndexError):
        activation_ranges(model, [[model.config.vocab_size]])
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_the_judging_text_is_not_the_calibration_text() -> None:
    def sentences(text: str) -> set[str]:
        return {part.strip() for part in " ".join(text.split()).split(". ") if len(part) > 20}

    assert len(sentences(CALIBRATION_TEXT)) > 5
    assert not sentences(CALIBRATION_TEXT) & sentences(PARITY_TEXT)


@pytest.mark.parametrize(("precision", "count"), [("fp32", 0), ("int8", 8), ("int4", 8)])
def test_export_smooths_where_weights_are_rounded(
    precision: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = SourceModel(
        model=tiny_model("llama"),
        generation=GenerationDefaults(),
        tokenizer_json=None,
        chat_template=None,
        special_tokens={},
        source={},
        notes=(),
    )
    monkeypatch.setattr(export_module, "open_source", lambda *_, **__: opened)
    monkeypatch.setattr(export_module, "torch_to_onnx", lambda *_: exported("llama"))
    bundle = export("any", tmp_path / "out", precision=precision, verify=False)
    assert bundle.fusions["smoothed"] == count


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_b56_best_tokens_agree_at_every_accuracy_level_although_channels_stand_out(
    precision: str, record_property: Callable[[str, object], None]
) -> None:
    """Channels 100 times the others; levels 0 and 1 multiply exact activations, 4 rounds them to 8 bits."""
    eager, measured = tiny_model("llama"), activation_ranges(tiny_model("llama"), [random_ids(60, seed=5)])
    feed = decoder_feed(CONFIGS["llama"], (0,) * 8, 32)
    wanted = eager_step(eager, feed)["logits"].argmax(axis=-1)
    agreement: dict[tuple[int, bool], float] = {}
    for level in (0, 1, 4):
        for is_smoothed in (True, False):
            model = exported("llama")
            ranges = add_outliers(model, measured, size=100.0)
            plan = dataclasses.replace(
                plan_for("llama", precision, ranges if is_smoothed else {}), accuracy_level=level
            )
            compile_graph(model, plan)
            levels = {n.attributes["accuracy_level"].as_int() for n in model.graph if n.op_type == "MatMulNBits"}
            assert levels == {level}
            agreement[level, is_smoothed] = float((run_graph(model, feed)["logits"].argmax(axis=-1) == wanted).mean())
            record_property(
                f"{precision}, level {level}, smoothed {is_smoothed}: agreement", agreement[level, is_smoothed]
            )
    for is_smoothed in (True, False):
        assert agreement[0, is_smoothed] == agreement[1, is_smoothed]  # one kernel
    for level in (0, 1, 4):
        assert agreement[level, True] > agreement[level, False]
    if precision == "int8":
        assert agreement[0, True] > agreement[4, True] > 0.7  # 0.89, 0.80
        assert agreement[4, False] < 0.5  # 0.18
