"""Ill-conditioned models: float32's own loss sets their limits, right graphs keep them, and planted faults do not.

Rows are few here, and every model is deep, so that last bits grow on the way through the layers.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from certificates import change_certificate, edit_attribute, edit_graph, edit_weight, rehash
from parity import assert_parity
from tiny_graphs import CONFIGS, export_decoder, make_model, make_plan, tiny_model

import graphport.export.certify as certify_module
import graphport.export.float_loss as loss_module
import graphport.export.model_export as export_module
from graphport.cli import main
from graphport.export import export
from graphport.export.certify import certify_stages, eager_logits, loss_of_text
from graphport.export.float_loss import float64_parameters
from graphport.export.parity import TOLERANCES, ParityError, check, compare, require_passed
from graphport.export.pipeline import compile_graph
from graphport.model_def.certificate import Certificate, CertificateError, read_certificate
from graphport.model_def.conditioning import LOSS_FACTOR, MOST_KL, MOST_RELATIVE, FloatLoss
from graphport.model_def.ops import attend, rms_norm
from graphport.model_def.signature import CERTIFICATE_FILE, read_manifest
from graphport.model_def.transformer import Transformer
from graphport.runtime.verification import verify

NUM_LAYERS = 12
IDS = np.random.default_rng(3).integers(61, size=40).tolist()
ABSOLUTE = TOLERANCES["compiled", "max_abs"]


def deep_model(*, sharpness: float, size: float) -> Transformer:
    """Scores `sharpness`^2 times as large as those of the other tiny models, embeddings and so logits `size` times."""
    model = make_model(dataclasses.replace(CONFIGS["llama"], blocks=CONFIGS["llama"].blocks[:1] * NUM_LAYERS))
    with torch.no_grad():
        model.embedding.weight.mul_(size)
        for layer in model.layers:
            layer.attention.query.weight.mul_(sharpness)
            layer.attention.key.weight.mul_(sharpness)
    return model


@pytest.fixture(scope="module")
def deep() -> Transformer:
    """Logits of about 200, of which float32 loses 0.09."""
    return deep_model(sharpness=4.0, size=30.0)


@pytest.fixture(scope="module")
def graph(deep: Transformer) -> ir.Model:
    return export_decoder(deep)


@pytest.fixture(scope="module")
def export_deep(deep: Transformer, graph: ir.Model) -> Callable[[Path, str], Path]:
    def made(out: Path, precision: str) -> Path:
        with pytest.MonkeyPatch.context() as patched:  # the graph is traced once
            patched.setattr(export_module, "torch_to_onnx", lambda *_: graph.clone())
            return export(deep, out, precision=precision).path

    return made


@pytest.fixture(scope="module")
def bundle(export_deep: Callable[[Path, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_deep(tmp_path_factory.mktemp("deep") / "bundle", "fp32")


def certificate_of(bundle: Path) -> Certificate:
    return read_certificate(bundle, read_manifest(bundle))


def test_a_right_bundle_keeps_limits_by_what_float32_loses_and_says_so(bundle: Path) -> None:
    certificate = certificate_of(bundle)
    assert certificate.conditioning is not None
    loss = certificate.conditioning.losses["logits"]
    assert 100 < loss.largest.max() < 1000
    assert 0.01 < loss.max_abs.max() < 1
    beyond = [one for one in certificate.checks if one.name.endswith("max_abs") and one.tolerance > ABSOLUTE]
    assert beyond
    for one in beyond:
        assert ABSOLUTE < one.measured <= one.tolerance <= LOSS_FACTOR * loss.max_abs.max()
        assert re.search(r"float32 itself loses \S+ there, so the limit is \S+ and not 0.0005", one.detail)
    assert all(one.passed for one in certificate.checks)


def test_verify_report_and_the_page_say_it(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(bundle), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"]
    words = next(note for note in answer["notes"] if note.startswith("ill-conditioned: eager PyTorch in float32"))
    assert any(one["tolerance"] > ABSOLUTE and "against eager" in one["name"] for one in answer["checks"])
    page = tmp_path / "page.html"
    assert main(["report", str(bundle), "--json", "--html", str(page)]) == 0
    assert json.loads(capsys.readouterr().out)["conditioning"] == words
    assert words in page.read_text(encoding="utf-8")
    assert main(["report", str(bundle)]) == 0
    assert "ill-conditioned: eager PyTorch" in " ".join(capsys.readouterr().err.split())


BUNDLE_FAULTS: dict[str, Callable[[Any], None]] = {
    "a weight doubled": lambda model: edit_weight(model, "blocks.0.attention.query_key_value.weight", doubled),
    "heads swapped": lambda model: edit_weight(
        model, "blocks.0.attention.query_key_value.weight", lambda w: np.roll(w, 16, axis=1)
    ),
    "scale 1 % off": lambda model: edit_attribute(model, "GroupQueryAttention", "scale", 0.2525),
    "a window of 30": lambda model: edit_attribute(model, "GroupQueryAttention", "local_window_size", 30),
    "epsilon 0.1": lambda model: edit_attribute(model, "SkipSimplifiedLayerNormalization", "epsilon", 0.1),
}


def doubled(values: np.ndarray) -> np.ndarray:
    values[7, 11] *= 2
    return values


@pytest.mark.parametrize("fault", BUNDLE_FAULTS)
def test_a_fault_in_an_ill_conditioned_bundle_is_caught(fault: str, bundle: Path, tmp_path: Path) -> None:
    wrong = Path(shutil.copytree(bundle, tmp_path / "b"))
    edit_graph(wrong, BUNDLE_FAULTS[fault])
    # its own rows would tell too: here the original's alone are asked
    change_certificate(wrong, shipped={})
    rehash(wrong)
    failed = {one.name for one in verify(wrong, device="cpu", threads=1).checks if not one.passed}
    assert "prefill: max_abs against eager PyTorch" in failed


GRAPH_FAULTS: dict[str, tuple[str, str, float | int]] = {
    "scale 1 % off": ("GroupQueryAttention", "scale", 0.2525),
    "a window of 30": ("GroupQueryAttention", "local_window_size", 30),
    "epsilon 0.1": ("SkipSimplifiedLayerNormalization", "epsilon", 0.1),
}


@pytest.mark.parametrize("fault", [None, *GRAPH_FAULTS])
def test_the_stages_of_an_export_pass_without_a_fault_and_no_otherwise(
    fault: str | None, deep: Transformer, graph: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(model: ir.Model, plan: Any) -> Any:
        reports = compile_graph(model, plan)
        op_type, name, value = GRAPH_FAULTS[fault or ""]
        for node in model.graph:
            if node.op_type == op_type:
                is_float = isinstance(value, float)
                node.attributes[name] = ir.AttrFloat32(name, value) if is_float else ir.AttrInt64(name, int(value))
        return reports

    if fault is not None:
        monkeypatch.setattr(certify_module, "compile_graph", compiled)
    reference = eager_logits(deep, IDS)
    checks = certify_stages(
        graph,
        make_plan(deep.config),
        IDS,
        reference,
        folder=tmp_path / "out",
        observe=lambda _: None,
        loss=loss_of_text(deep, IDS, lambda: reference),
    )
    assert checks[0].tolerance > ABSOLUTE
    assert [one.passed for one in checks if one.name.endswith("max_abs")] == [True, *[fault is None] * 2]


def test_where_float32_computes_nothing_no_limit_allows_for_it(tmp_path: Path) -> None:
    chaotic = deep_model(sharpness=6.0, size=1.0)
    with pytest.raises(ParityError, match=r"float32 itself loses \S+ there, so much that nothing computed in it is"):
        export(chaotic, tmp_path / "out", precision="fp32")
    assert not list(tmp_path.iterdir())


def test_a_model_within_its_absolute_limits_is_never_run_in_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("eager ran in float64")

    monkeypatch.setattr(loss_module, "float64_parameters", fail)
    made = export(tiny_model("llama"), tmp_path / "out", precision="fp32").path
    certificate = certificate_of(made)
    assert certificate.conditioning is None
    limits = {limit.figure: limit for limit in certificate.limits if limit.against == "original"}
    assert limits["max_abs"].conditioned
    assert main(["verify", str(made)]) == 0


def test_limits_of_rounded_weights_stay_what_rounding_may_cost(
    export_deep: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    certificate = certificate_of(export_deep(tmp_path / "out", "int8"))
    assert certificate.conditioning is not None  # of the stages in float32
    assert not any(limit.conditioned for limit in certificate.limits)
    shipped = [one for one in certificate.checks if one.name.startswith(("int8", "prefill: kl against eager"))]
    assert {one.tolerance for one in shipped} == {TOLERANCES["int8", "kl"]}


def test_a_bundle_without_certificate_gets_one_that_knows_the_loss(bundle: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(bundle, tmp_path / "b"))
    (bare / CERTIFICATE_FILE).unlink()
    rehash(bare, certificate=False)
    source = tmp_path / "deep.py"
    source.write_text(
        "import test_conditioning\ndef make():\n    return test_conditioning.deep_model(sharpness=4.0, size=30.0)\n"
    )
    for _ in range(2):  # made anew, then compared with a fresh reference
        assert main(["verify", str(bare), "--against", f"{source}:make", "--write"]) == 0
        assert certificate_of(bare).conditioning is not None
        assert verify(bare, device="cpu", threads=1).passed


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda data: data["limits"][0].update(figure="cosine", conditioned=True), "no limit of this version"),
        (lambda data: data["conditioning"]["losses"]["logits"].update(rms=""), "of different numbers of rows"),
        (lambda data: data["conditioning"]["losses"].update(logits=FEW_ROWS.to_dict()), "of other rows of logits"),
    ],
)
def test_a_certificate_whose_loss_or_limits_do_not_fit_is_damaged(
    spoil: Callable[[Any], None], words: str, bundle: Path, tmp_path: Path
) -> None:
    wrong = Path(shutil.copytree(bundle, tmp_path / "b"))
    data = json.loads((wrong / CERTIFICATE_FILE).read_text(encoding="utf-8"))
    spoil(data)
    change_certificate(wrong, **data)
    rehash(wrong, certificate=False)
    with pytest.raises(CertificateError, match=f"is damaged .*{words}"):
        certificate_of(wrong)


def loss(**figures: list[float]) -> FloatLoss:
    rows = {name: np.array(values, np.float32) for name, values in figures.items()}
    return FloatLoss(**{**dict.fromkeys(("max_abs", "rms", "kl", "largest"), np.zeros(2, np.float32)), **rows})


FEW_ROWS = loss(max_abs=[0.0, 0.0])


def test_each_row_is_held_to_its_own_loss() -> None:
    one = loss(max_abs=[1e-3, 1e-6], largest=[10.0, 10.0])
    rows = np.array([0, 1])
    inside = one.nearest("max_abs", np.array([9e-3, 4e-4]), rows, 5e-4)
    assert inside[:3] == pytest.approx((9e-3, 1e-2, 1e-3))
    outside = one.nearest("max_abs", np.array([9e-3, 6e-4]), rows, 5e-4)
    assert outside[:3] == pytest.approx((6e-4, 5e-4, 1e-6))
    capped = one.nearest("max_abs", np.array([0.2]), rows[:1], 5e-4)
    assert capped == pytest.approx((0.2, 1e-2, 1e-3, False))
    assert loss(max_abs=[1.0, 0.0], largest=[10.0, 0.0]).nearest("max_abs", np.array([0.2]), rows[:1], 5e-4)[1:] == (
        pytest.approx(10 * MOST_RELATIVE),
        1.0,
        True,
    )
    infinite = one.nearest("max_abs", np.array([np.inf, 0.0]), rows, 5e-4)
    assert infinite.error == np.inf


def test_a_divergence_is_held_to_the_square_as_a_mean() -> None:
    one = loss(kl=[1e-9, 3e-9])
    assert one.nearest("kl", np.array([0.0, 4e-7]), np.array([0, 1]), 1e-9)[:3] == pytest.approx((2e-7, 2e-7, 2e-9))
    much = loss(kl=[1.0, 1.0]).nearest("kl", np.array([2.0, 2.0]), np.array([0, 1]), 1e-9)
    assert (much.limit, much.is_capped) == (MOST_KL, True)


@pytest.mark.parametrize("wrong", ["zeros", "shifted by one", "nan"])
def test_a_loss_does_not_excuse_wrong_logits(wrong: str) -> None:
    right = (300 * np.random.default_rng(0).standard_normal((20, 50))).astype(np.float32)
    found = {"zeros": 0 * right, "shifted by one": np.roll(right, 1, axis=0), "nan": right * np.nan}[wrong]
    figures = dict.fromkeys(("max_abs", "rms", "kl"), [1e-3] * 20)
    lossy = loss(**figures, largest=np.abs(right).max(axis=1).tolist())
    checks = tuple(
        check("compiled", figure, "it", compare(right, found), loss=lambda: lossy) for figure in ("max_abs", "kl")
    )
    assert not any(one.passed for one in checks)
    with pytest.raises(ParityError, match="2 of 2 parity checks failed"):
        require_passed(checks)


def test_float64_holds_everywhere_and_leaves_the_very_tensors(deep: Transformer) -> None:
    before = [(parameter, parameter.data_ptr(), parameter.dtype) for parameter in deep.parameters()]
    with float64_parameters(deep), torch.inference_mode():
        wide = deep(torch.tensor([IDS]))
    assert wide.dtype == torch.float64
    assert [(parameter, parameter.data_ptr(), parameter.dtype) for parameter in deep.parameters()] == before
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(7, 33, generator=generator, dtype=torch.float64) for _ in range(2))
    wanted = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6) * weight[0]
    assert_parity(rms_norm(x, weight[0], 1e-6), wanted, "norm", dtype="float64")
    query, key, value = (torch.randn(1, 2, 5, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    attended = attend(query, key, value, visible=None, bias=None, scale=0.3, softcap=0.0)
    scores = torch.exp(query @ key.transpose(-1, -2) * 0.3)
    assert_parity(attended, scores / scores.sum(dim=-1, keepdim=True) @ value, "attention", dtype="float64")
