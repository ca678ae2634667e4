"""Parity figures on logits made by hand, and certificates that fail when any one stage is broken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tiny_graphs import CONFIGS, MAX_LENGTH, exported, make_plan, save_and_open, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers

import graphport.export.certify as certify_module
import graphport.export.model_export as export_module
from graphport.export.certify import certify_stages, check_shipped, eager_logits, parity_ids
from graphport.export.graph_runner import GraphRunner
from graphport.export.model_export import export
from graphport.export.parity import (
    TOLERANCES,
    Difference,
    ParityError,
    check,
    compare,
    require_passed,
    row_figures,
)
from graphport.export.pipeline import compile_graph
from graphport.export.source import SourceModel
from graphport.model_def.certificate import Check
from graphport.model_def.conditioning import CONDITIONED_FIGURES
from graphport.model_def.decoder_runs import NUM_IDS
from graphport.model_def.parity_text import PARITY_TEXT
from graphport.model_def.signature import GRAPH_FILE, GenerationDefaults


def logits(rows: int = 70, width: int = 50, seed: int = 0) -> Any:
    return (3 * np.random.default_rng(seed).standard_normal((rows, width))).astype(np.float32)


def test_equal_logits_differ_by_nothing() -> None:
    found = compare(logits(), logits())
    assert found == Difference(
        max_abs=0.0, mean_abs=0.0, rms=0.0, worst=(0, 0), kl=0.0, top1=1.0, rows=row_figures(logits(), logits())
    )
    assert not any(getattr(found.rows, figure).any() for figure in CONDITIONED_FIGURES)


def test_figures_are_those_of_the_formula() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32))
    candidate = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], np.float32))
    difference = compare(reference, candidate)
    assert difference.kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2, rel=1e-5)
    assert difference.max_abs == pytest.approx(np.log(2), rel=1e-5)
    assert difference.mean_abs == pytest.approx(2 * np.log(2) / 6, rel=1e-5)
    assert difference.top1 == 0.5
    assert difference.worst in {(0, 0), (0, 1)}


def test_a_constant_added_to_a_row_has_no_divergence() -> None:
    assert np.abs(row_figures(logits(), logits() + 5).kl).max() <= TOLERANCES["compiled", "kl"]
    assert compare(logits(), logits() + 5).max_abs == pytest.approx(5, rel=1e-5)


def test_the_worst_place_is_found_in_later_rows() -> None:
    candidate = logits()
    candidate[67, 31] += 9
    difference = compare(logits(), candidate)
    assert difference.worst == (67, 31)
    assert difference.max_abs == pytest.approx(9, rel=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_value_that_is_not_finite_is_an_infinite_difference(value: float, side: int) -> None:
    pair = [logits(), logits()]
    pair[side][3, 4] = value
    difference = compare(*pair)
    assert (difference.max_abs, difference.worst) == (np.inf, (3, 4))
    assert not check("compiled", "max_abs", "it", difference).passed
    both = compare(pair[side], pair[side])
    assert not check("compiled", "max_abs", "it", both).passed


def test_other_shapes_and_nothing_to_compare_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reference logits are \(70, 50\), candidate's \(69, 50\)"):
        compare(logits(), logits(69))
    with pytest.raises(ValueError, match="hold nothing to compare"):
        compare(logits(0), logits(0))


def wrong(kind: str, right: Any) -> Any:
    return {
        "zeros": np.zeros_like(right),
        "shifted by one": np.roll(right, 1, axis=0),
        "two ids swapped": right[:, [1, 0, *range(2, right.shape[1])]],
        "nan": np.full_like(right, np.nan),
    }[kind]


@pytest.mark.parametrize("kind", ["zeros", "shifted by one", "two ids swapped", "nan"])
@pytest.mark.parametrize(("stage", "figure"), TOLERANCES)
def test_every_tolerance_rejects_wrong_logits(stage: str, figure: str, kind: str) -> None:
    right = logits()
    if kind == "two ids swapped":
        right[:, :2] = [12.0, -12.0]  # ids that matter
    with pytest.raises(ParityError, match=f"1 of 1 parity checks failed: {stage}: it, {figure}: .* > "):
        require_passed((check(stage, figure, "it", compare(right, wrong(kind, right))),))
    require_passed((check(stage, figure, "it", compare(right, right)),))


def test_the_error_names_every_check_that_failed() -> None:
    good, bad = Check(name="a", measured=1.0, tolerance=1.0), Check(name="b", measured=2.0, tolerance=1.0, detail="why")
    unknown = Check(name="c", measured=float("nan"), tolerance=1.0)
    with pytest.raises(ParityError, match=r"2 of 3 parity checks failed: b: 2 > 1 \(why\); c: nan > 1"):
        require_passed((good, bad, unknown))


def test_ids_are_the_texts_or_seeded() -> None:
    model = tiny_model("llama")
    first, second, other = (parity_ids(model.config, None, max_length=20, seed=seed) for seed in (1, 1, 2))
    assert first == second != other
    assert len(first) == 20
    assert max(first) < model.config.vocab_size
    seeded = parity_ids(model.config, None, max_length=NUM_IDS, seed=1)
    for num_words in (61, 70):  # the model knows 61 ids
        known = sorted(set(PARITY_TEXT.split()))[-num_words:]
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token=known[0]))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        wanted = words.encode(PARITY_TEXT).ids[:NUM_IDS] if num_words == 61 else seeded
        assert parity_ids(model.config, words.to_str(), max_length=NUM_IDS, seed=1) == wanted


def change(model: ir.Model, op_type: str, **attributes: Any) -> None:
    nodes = [node for node in model.graph if node.op_type == op_type]
    assert nodes, op_type
    for node in nodes:
        for name, value in attributes.items():
            assert name in node.attributes
            node.attributes[name] = (
                ir.AttrFloat32(name, value) if isinstance(value, float) else ir.AttrInt64(name, value)
            )


def roll(model: ir.Model, name: str, rows: int) -> None:
    value = model.graph.initializers[name]
    assert value.const_value is not None
    value.const_value = ir.tensor(np.roll(value.const_value.numpy(), rows, axis=0), name=name)


def packed_weight(model: ir.Model) -> str:
    return next(name for name in model.graph.initializers if "query_key_value.weight" in name and "scales" not in name)


EXPORTED_FAULTS: dict[str, Callable[[ir.Model], None]] = {
    "cosines shifted by one": lambda model: roll(model, "cos_1", 1),
    "window off by one": lambda model: change(model, "RotaryCachedAttention", local_window_size=7),
    "softcap dropped": lambda model: change(model, "RotaryCachedAttention", softcap=0.0),
    "epsilon wrong": lambda model: change(model, "RMSNorm", epsilon=0.01),
    "a key weight's heads swapped": lambda model: roll(model, "blocks.0.attention.query.weight", 16),
}

COMPILED_FAULTS: dict[str, Callable[[ir.Model], None]] = {
    "window off by one": lambda model: change(model, "GroupQueryAttention", local_window_size=7),
    "softcap dropped": lambda model: change(model, "GroupQueryAttention", softcap=0.0),
    "epsilon wrong": lambda model: change(model, "SkipSimplifiedLayerNormalization", epsilon=0.01),
    "scale wrong": lambda model: change(model, "GroupQueryAttention", scale=0.25),
}


def certify(model: ir.Model, folder: Path) -> tuple[Check, ...]:
    plan, eager = make_plan(CONFIGS["gemma"]), tiny_model("gemma")
    ids = parity_ids(eager.config, None, max_length=MAX_LENGTH, seed=0)
    reference = eager_logits(eager, ids)
    return certify_stages(model, plan, ids, reference, folder=folder / "out", observe=lambda _: None)


def test_a_right_model_passes_every_stage(tmp_path: Path) -> None:
    checks = certify(exported("gemma"), tmp_path)
    require_passed(checks)
    assert [c.name.split(":")[0] for c in checks] == ["exported", "compiled", "compiled", "compiled"]
    assert "chunks and steps" in checks[-1].name
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", EXPORTED_FAULTS)
def test_the_exported_stage_rejects(fault: str, tmp_path: Path) -> None:
    model = exported("gemma")
    EXPORTED_FAULTS[fault](model)
    checks = certify(model, tmp_path)
    assert not checks[0].passed, checks[0]


@pytest.mark.parametrize("fault", COMPILED_FAULTS)
def test_the_fused_stage_rejects(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: ir.Model, plan: Any) -> Any:
        reports = compile_graph(model, plan)
        COMPILED_FAULTS[fault](model)
        return reports

    monkeypatch.setattr(certify_module, "compile_graph", broken)
    first, *fused = certify(exported("gemma"), tmp_path)
    assert first.passed
    assert not any(c.passed for c in fused), fused


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_the_shipped_stage_rejects_swapped_heads_in_packed_qkv(precision: str, tmp_path: Path) -> None:
    plan, eager = make_plan(CONFIGS["llama"], precision), tiny_model("llama")
    ids = parity_ids(eager.config, None, max_length=MAX_LENGTH, seed=0)
    reference = eager_logits(eager, ids)
    model = exported("llama")
    compile_graph(model, plan)
    save_and_open(model, tmp_path / "right")

    def shipped(folder: Path) -> Check:
        runner = GraphRunner(folder / GRAPH_FILE, plan.config, optimize=True)
        return check_shipped(plan, len(ids), reference, runner.logits(ids))

    require_passed((shipped(tmp_path / "right"),))
    name = packed_weight(model)
    value = model.graph.initializers[name]
    assert value.const_value is not None
    heads_last = precision == "fp32"  # [in, out]; quantised blocks lie [out, blocks, bytes]
    tensor = ir.tensor(np.roll(value.const_value.numpy(), 16, axis=1 if heads_last else 0), name=name)
    value.const_value = tensor
    save_and_open(model, tmp_path / "wrong")
    assert not shipped(tmp_path / "wrong").passed


@pytest.mark.parametrize("stage", ["exported", "fused", "shipped"])
def test_export_raises_and_leaves_nothing_when_a_stage_is_wrong(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = SourceModel(
        model=tiny_model("gemma"),
        generation=GenerationDefaults(),
        tokenizer_json=None,
        chat_template=None,
        source={},
        special_tokens={},
        notes=(),
    )

    def broken_trace(*_: Any) -> ir.Model:
        model = exported("gemma")
        if stage == "exported":
            EXPORTED_FAULTS["window off by one"](model)
        return model

    def broken_compile(model: ir.Model, plan: Any) -> Any:
        reports = compile_graph(model, plan)
        COMPILED_FAULTS["softcap dropped"](model)
        return reports

    monkeypatch.setattr(export_module, "open_source", lambda *_, **__: opened)
    monkeypatch.setattr(export_module, "torch_to_onnx", broken_trace)
    if stage != "exported":
        monkeypatch.setattr(certify_module if stage == "fused" else export_module, "compile_graph", broken_compile)
    name = {"exported": "exported", "fused": "compiled", "shipped": "compiled"}[stage]
    with pytest.raises(ParityError, match=rf"parity checks failed: {name}: "):
        export("any", tmp_path / "out", precision="fp32")
    assert not list(tmp_path.iterdir())
