"""Precision auto: the budget holds by measurement, the choice is what the graph has, and what cannot be met is said."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
from parity import assert_parity
from tiny_checkpoints import make_model as make_checkpoint
from tiny_checkpoints import write_gguf
from tiny_graphs import (
    CONFIGS,
    decoder_feed,
    exported,
    make_config,
    make_model,
    open_folder,
    run_session,
    tiny_model,
)
from tiny_models import tiny_encoder_configs
from tiny_models import tiny_model as tiny_encoder

import graphport.export.model_export as export_module
from graphport.export.bundle import Bundle
from graphport.export.calibration import Calibration, calibration_ids
from graphport.export.certify import eager_logits
from graphport.export.graph_runner import GraphRunner
from graphport.export.model_export import export
from graphport.export.parity import compare
from graphport.export.precision_budget import DEFAULT_BUDGET, Probe, _search, check_budget
from graphport.export.source import SourceModel
from graphport.export.targets import TargetError
from graphport.model_def.signature import FUSIONS_FILE, GRAPH_FILE, WEIGHTS_FILE, GenerationDefaults
from graphport.model_def.transformer import Transformer
from graphport.runtime import load
from graphport.runtime.preparation import prepare
from graphport.runtime.verification import verify

IDS = [int(i) for i in np.random.default_rng(7).integers(61, size=60)]
COSTS = [0.5 * 0.9**i for i in range(120)]


def additive(num_high: int) -> float:
    return 0.002 + 0.02 * sum(COSTS[num_high:])


@pytest.mark.parametrize("max_kl", [0.0021, 0.003, 0.01, 0.05, 0.09, 0.2])
def test_the_search_finds_the_fewest_groups_in_a_dozen_graphs(max_kl: float) -> None:
    seen: list[int] = []

    def measure(num_high: int) -> Probe:
        seen.append(num_high)
        return Probe(num_high=num_high, kl=additive(num_high), num_bytes=0)

    found = _search(measure, COSTS, max_kl=max_kl)
    assert found.num_high == next(k for k in range(121) if additive(k) <= max_kl)
    assert len(seen) <= 12


@pytest.mark.parametrize("seed", range(5))
def test_the_search_never_returns_a_graph_that_was_not_measured_to_hold(seed: int) -> None:
    """Sensitivities that say nothing, and a divergence that goes up and down."""
    random = np.random.default_rng(seed)
    kls = {k: float(additive(k) * random.uniform(0.5, 2.0)) for k in range(121)}
    kls[120] = 0.002
    costs = [float(c) for c in random.permutation(COSTS)]
    found = _search(lambda k: Probe(num_high=k, kl=kls[k], num_bytes=0), costs, max_kl=0.01)
    assert kls[found.num_high] <= 0.01


def test_what_cannot_be_met_names_the_best_and_what_to_ask_for() -> None:
    with pytest.raises(TargetError, match=r"max_kl 0\.001 cannot be met: .* is 0\.00213; choose --max-kl 0\.0022 or"):
        _search(lambda k: Probe(num_high=k, kl=0.00213 + 120 - k, num_bytes=0), COSTS, max_kl=0.001)
    with pytest.raises(TargetError, match="the divergence is inf"):
        _search(lambda k: Probe(num_high=k, kl=math.inf, num_bytes=0), COSTS, max_kl=0.001)


@pytest.mark.parametrize("value", [0, -0.01, math.nan, math.inf, True, "0.1"])
def test_a_budget_that_is_no_positive_number_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_kl must be a positive number of nats, got .*; for example 0\.01"):
        export(tmp_path / "no model here", tmp_path / "out", precision="auto", max_kl=value)


@pytest.mark.parametrize("precision", [None, "int4", "fp32"])
def test_a_budget_without_auto_is_refused(precision: str | None, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="max_kl is the budget of precision auto: choose --precision auto or leave"):
        export(tmp_path / "no model here", tmp_path / "out", precision=precision, max_kl=0.01)


def test_auto_without_a_budget_has_the_default() -> None:
    assert check_budget(None, chooses_bits=True) == DEFAULT_BUDGET
    assert check_budget(None, chooses_bits=False) is None


def source_of(model: Transformer) -> SourceModel:
    return SourceModel(
        model=model,
        generation=GenerationDefaults(),
        tokenizer_json=None,
        chat_template=None,
        special_tokens={},
        source={"format": "test"},
        notes=(),
    )


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, dict[str, Any], Calibration]:
    """The tiny Llama under a budget between what 4 and 8 bits everywhere measure."""
    model = tiny_model("llama")
    patch = pytest.MonkeyPatch()
    patch.setattr(export_module, "open_source", lambda *_, **__: source_of(model))
    patch.setattr(export_module, "torch_to_onnx", lambda *_: exported("llama"))
    with patch.context():
        out = tmp_path_factory.mktemp("auto") / "out"
        bundle = export("any", out, precision="auto", max_kl=BETWEEN)
    patch.undo()
    choice = json.loads((bundle.path / FUSIONS_FILE).read_text())["choice"]
    return bundle, choice, calibration_ids(source_of(model), max_length=64, seed=1)


BETWEEN = 0.02


def test_auto_is_the_smallest_graph_found_within_the_budget(
    chosen: tuple[Bundle, dict[str, Any], Calibration],
) -> None:
    bundle, choice, calibration = chosen
    assert bundle.manifest.precision == "auto"
    assert choice["max_kl"] == BETWEEN
    assert {group["form"] for group in choice["groups"]} == {"4-bit/32", "8-bit/32"}
    probes = {probe["num_high"]: probe for probe in choice["probes"]}
    assert probes[0]["kl"] > BETWEEN >= choice["kl"]
    num_high = sum(group["form"] == "8-bit/32" for group in choice["groups"])
    assert probes[num_high]["kl"] == choice["kl"]
    assert probes[0]["num_bytes"] < choice["num_bytes"] <= probes[len(choice["groups"])]["num_bytes"]
    assert min(p["num_bytes"] for p in probes.values() if p["kl"] <= BETWEEN) == choice["num_bytes"]
    (check,) = (check for check in bundle.certificate if check.name.startswith("budget: "))
    assert (check.measured, check.tolerance, check.passed) == (choice["kl"], BETWEEN, True)
    # what ships is what was measured
    ids = calibration.held_out
    assert len(ids) == choice["num_tokens"]
    found = GraphRunner(bundle.path / GRAPH_FILE, bundle.manifest.config, optimize=True).logits(ids)
    assert compare(eager_logits(tiny_model("llama"), ids), found).kl == choice["kl"]


def test_the_graph_has_the_bits_and_bytes_that_the_choice_lists(
    chosen: tuple[Bundle, dict[str, Any], Calibration],
) -> None:
    bundle, choice, _ = chosen
    graph = onnx.load(bundle.path / GRAPH_FILE, load_external_data=False).graph
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    listed: dict[tuple[int, int], int] = {}
    for group in choice["groups"]:
        key = int(group["form"][0]), int(group["names"][0].split(".")[1])
        listed[key] = listed.get(key, 0) + group["num_bytes"]
    found: dict[tuple[int, int], int] = {}
    for node in graph.node:
        if node.op_type == "MatMulNBits" and node.input[1].startswith("blocks."):
            bits = next(a.i for a in node.attribute if a.name == "bits")
            key = bits, int(node.input[1].split(".")[1])
            size = sum(sizes[name] * (1 if types[name] == onnx.TensorProto.UINT8 else 4) for name in node.input[1:])
            found[key] = found.get(key, 0) + size
    assert found == listed


def test_b58_the_saved_bundle_runs_without_its_source_and_verifies(
    chosen: tuple[Bundle, dict[str, Any], Calibration],
) -> None:
    bundle, _, _ = chosen  # its source was a module in memory
    checks = verify(bundle.path).checks
    assert all(check.passed for check in checks)
    matrices = sum(p.numel() for p in tiny_model("llama").parameters() if p.dim() == 2)
    assert (bundle.path / WEIGHTS_FILE).stat().st_size < 0.35 * 4 * matrices


def test_b57_a_row_of_4_and_8_bit_products_does_not_depend_on_its_neighbours(
    chosen: tuple[Bundle, dict[str, Any], Calibration],
) -> None:
    """Activations are rounded by rows and blocks, so not even by a neighbour's large ones."""
    bundle, _, _ = chosen
    with load(bundle.path, max_batch=4) as lm:
        alone = lm.logits([IDS[:9]])[0]
        for neighbours in ([[5]], [IDS[:40], [0] * 40], [[7] * 3, IDS[9:18], IDS[:1]]):
            assert_parity(lm.logits([IDS[:9], *neighbours])[0], alone, "compiled")
        assert np.abs(lm.logits([IDS[1:10]])[0] - alone).max() > 1


def test_a_bundle_of_mixed_bits_is_packed_for_a_processor_like_others(
    chosen: tuple[Bundle, dict[str, Any], Calibration], tmp_path: Path
) -> None:
    shutil.copytree(chosen[0].path, tmp_path / "bundle")
    with load(tmp_path / "bundle") as lm:
        wanted = lm.logits([IDS])[0]
    assert prepare(tmp_path / "bundle").divergence < 1e-6
    with load(tmp_path / "bundle") as lm:
        assert_parity(lm.logits([IDS])[0], wanted, "compiled")


def test_b60_dynamic_axes_survive_a_mixture_of_bits(chosen: tuple[Bundle, dict[str, Any], Calibration]) -> None:
    bundle, _, _ = chosen
    session = open_folder(bundle.path)
    dims = {value.name: value.shape for value in session.get_inputs()}
    assert dims["input_ids"] == ["batch", "sequence"]
    assert dims["past_key_values.0.key"] == ["batch", 2, "capacity", 16]
    for batch, num_new, past in ((1, 1, 0), (3, 17, 0), (1, 17, 9), (3, 1, 9)):
        feed = decoder_feed(CONFIGS["llama"], (past,) * batch, num_new)
        logits = run_session(session, feed)["logits"]
        assert logits.shape == (batch * num_new, 61)
        assert np.isfinite(logits).all()


def test_a_budget_that_cannot_be_met_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(export_module, "open_source", lambda *_, **__: source_of(tiny_model("llama")))
    monkeypatch.setattr(export_module, "torch_to_onnx", lambda *_: exported("llama"))
    with pytest.raises(TargetError, match=r"max_kl 1e-12 cannot be met: with every matrix at its best .* or more"):
        export("any", tmp_path / "out", precision="auto", max_kl=1e-12, verify=False)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention in Q8_0, feed-forwards in Q4_0, of which fewer bits save nothing."""
    kinds = gguf.GGMLQuantizationType
    model = make_checkpoint("llama", hidden_size=64, intermediate_size=96)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, model, kind=lambda name: kinds.Q4_0 if "mlp" in name else kinds.Q8_0)


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_gguf_file_under_a_budget_keeps_its_own_blocks_where_fewer_bits_lose_too_much(
    is_strict: bool, gguf_file: Path, tmp_path: Path
) -> None:
    if is_strict:  # what the file's own blocks measure, and a little more
        with pytest.raises(TargetError, match=r"cannot be met: .* the divergence is .*; choose --max-kl") as refusal:
            export(gguf_file, tmp_path / "none", precision="auto", max_kl=1e-9, verify=False)
        budget = float(re.findall(r"--max-kl (\S+)", str(refusal.value))[0])
    else:
        budget = 5.0
    bundle = export(gguf_file, tmp_path / "out", precision="auto", max_kl=budget, verify=False)
    choice = json.loads((bundle.path / FUSIONS_FILE).read_text())["choice"]
    assert choice["kl"] <= budget
    own = [group for group in choice["groups"] if group["sensitivity"] is None]
    assert {name.split(".")[2] for group in own for name in group["names"]} == {"feed_forward"}
    others = [group for group in choice["groups"] if group not in own]
    assert len(own) == len(others) == 4
    if is_strict:
        assert any(group["form"] == "8-bit/32" for group in others)
        assert len(choice["probes"]) > 2
    else:
        assert {group["form"] for group in others} == {"4-bit/32"}
    assert bundle.fusions["smoothed"] == 0  # it would break the file's grids


def test_auto_of_an_encoder_is_refused_and_its_int4_is_rounded_on_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = next(config for config in tiny_encoder_configs().values() if config.head == "none")
    monkeypatch.setattr(export_module, "open_source", lambda *_, **__: source_of(tiny_encoder(config)))
    with pytest.raises(TargetError, match="measures the logits of a decoder, which an encoder lacks: choose int8 or"):
        export("any", tmp_path / "out", precision="auto")
    assert not (tmp_path / "out").exists()
    bundle = export("any", tmp_path / "out", precision="int4")
    assert all(check.passed for check in bundle.certificate)
    graph = onnx.load(bundle.path / GRAPH_FILE, load_external_data=False).graph
    zero_points = [node for node in graph.node if node.op_type == "MatMulNBits" and len(node.input) > 3]
    assert len(zero_points) == 4 * config.num_layers  # query, key and value are packed


def test_auto_for_cuda_is_measured_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(export_module, "open_source", lambda *_, **__: source_of(tiny_model("llama")))
    monkeypatch.setattr(export_module, "torch_to_onnx", lambda *_: exported("llama"))
    bundle = export("any", tmp_path / "out", target="cuda", precision="auto", max_kl=BETWEEN, verify=False)
    choice = json.loads((bundle.path / FUSIONS_FILE).read_text())["choice"]
    assert choice["kl"] <= BETWEEN
    graph = onnx.load(bundle.path / GRAPH_FILE, load_external_data=False).graph
    kernels = [node for node in graph.node if node.op_type == "MatMulNBits"]
    assert {a.i for node in kernels for a in node.attribute if a.name == "bits"} == {4, 8}
    assert not any(node.input[3:] for node in kernels)


def test_int4_of_an_export_is_closer_than_rounding_to_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = make_model(make_config(hidden_size=96))
    kls = {}
    for is_rounded in (True, False):
        if not is_rounded:
            monkeypatch.setattr(export_module, "plan_weights", lambda _, plan, *__, **___: (plan, None))
        export(model, tmp_path / str(is_rounded), precision="int4", verify=False)
        ids = calibration_ids(source_of(model), max_length=64, seed=9).held_out
        runner = GraphRunner(tmp_path / str(is_rounded) / GRAPH_FILE, model.config, optimize=True)
        kls[is_rounded] = compare(eager_logits(model, ids), runner.logits(ids)).kl
    assert kls[True] < 0.8 * kls[False]
