"""`graphport tune --against`: fusions that a bundle is faster without are named, or left out of it when asked for."""

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from parity import assert_parity
from tiny_graphs import exported
from tiny_sources import write_tiny_source

from graphport.cli import main
from graphport.export import export, fusion_variants, model_export
from graphport.export.fusion_variants import FusionVariants
from graphport.export.layouts import OPTIMUM
from graphport.export.parity import ParityError
from graphport.export.targets import TargetError
from graphport.model_def.signature import FUSIONS_FILE, MANIFEST_FILE, TUNING_FILE, ManifestError, read_manifest
from graphport.runtime import load, prepare
from graphport.runtime import tuning_trial as trial_module
from graphport.runtime.tuning import read_tuning
from graphport.runtime.tuning_trial import OpenedChoice, TuneError, tune
from graphport.runtime.verification import verify

IDS = list(range(30))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models by name, as functions in files."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("llama", "gemma"):
        (folder / f"{name}.py").write_text(
            f"def make():\n    import tiny_graphs\n    return tiny_graphs.tiny_model({name!r})\n"
        )
    return {name: f"{folder / name}.py:make" for name in ("llama", "gemma")}


@pytest.fixture(scope="module")
def made(sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fused") / "bundle"
    return export(sources["llama"], out, precision="fp32", layouts=["optimum"]).path


@pytest.fixture
def bundle(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trial_module, "questions", lambda **_: ())  # the fusions alone
    return Path(shutil.copytree(made, tmp_path / "bundle"))


RULES = ("residual_norm", "silu", "packed_gate_up")  # measured here, of those that are optional


@pytest.fixture
def traced_once(sources: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One trace for all exports of `llama`, and few rules: what is done with them is tested, not how they are made."""
    trace = exported("llama")
    monkeypatch.setattr(model_export, "torch_to_onnx", lambda *_: trace.clone())
    monkeypatch.setattr(fusion_variants, "OPTIONAL_RULES", RULES)


def plant(monkeypatch: pytest.MonkeyPatch, slow: Sequence[str]) -> None:
    """Stand for a machine on which the fusions `slow` cost time and the others save some."""

    @functools.cache
    def missing(folder: Path) -> tuple[str, ...]:
        counts = json.loads((folder / FUSIONS_FILE).read_text())["counts"]
        return tuple(rule for rule in RULES if not counts.get(rule))

    def seconds(opened: OpenedChoice) -> float:
        return 1.0 + sum(-0.1 if rule in slow else 0.1 for rule in missing(opened.bundle))

    monkeypatch.setattr(OpenedChoice, "seconds", seconds)


def tuned(capsys: pytest.CaptureFixture[str], bundle: Path, source: str, *options: str) -> dict[str, Any]:
    assert main(["tune", str(bundle), "--against", source, *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    found["by_what"] = {trial["what"]: trial for trial in found["trials"]}
    return found


@pytest.mark.usefixtures("traced_once")
def test_fusions_are_measured_against_the_source_and_only_named(
    bundle: Path, sources: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, ["silu"])
    before = (bundle / MANIFEST_FILE).read_bytes()
    trials = tuned(capsys, bundle, sources["llama"])["by_what"]
    assert set(trials) == {f"without fusion {rule}" for rule in RULES}
    for what, trial in trials.items():
        assert not trial["kept"]
        assert ("--drop-slow-fusions exports without it" in trial["verdict"]) is (what == "without fusion silu"), trial
    assert (bundle / MANIFEST_FILE).read_bytes() == before
    assert read_tuning(bundle).dropped == ()


@pytest.mark.usefixtures("traced_once")
def test_slow_fusions_are_left_out_of_the_bundle_when_that_is_asked_for(
    bundle: Path, sources: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both that cost time go, each measured without the other; the result is certified, packed and opens as tuned."""
    prepare(bundle)
    with load(bundle, device="cpu") as lm:
        wanted = lm.logits([IDS])[0]
    plant(monkeypatch, ["silu", "residual_norm"])
    found = tuned(capsys, bundle, sources["llama"], "--drop-slow-fusions")
    assert set(found["dropped"]) == {"silu", "residual_norm"}
    for what, trial in found["by_what"].items():
        assert trial["kept"] is (what.split()[-1] in found["dropped"])
        said = "and the bundle was exported again without it"
        assert (said in trial["verdict"]) is trial["kept"]
    account = json.loads((bundle / FUSIONS_FILE).read_text())
    assert set(account["disabled"]) == {"silu", "residual_norm"}
    assert not account["counts"].get("silu")
    assert verify(bundle, device="cpu", threads=1).passed
    assert OPTIMUM.graph_file in read_manifest(bundle).files
    with load(bundle, device="cpu") as lm:
        assert lm.is_prepared
        assert_parity(lm.logits([IDS])[0], wanted, "compiled")
    assert read_tuning(bundle).mismatch(trial_module.open_bundle(bundle)) is None
    assert main(["report", str(bundle), "--json"]) == 0
    assert "exported again without" in json.loads(capsys.readouterr().out)["tuning"]["words"]
    assert [path.name for path in bundle.parent.iterdir() if path.name.startswith(".")] == []


class Faulty:
    """Fusions of which one cannot be measured, and none dropped."""

    def __init__(self, bundle: Path, rules: Sequence[str] = ("pack_qkv", "silu")) -> None:
        self.bundle, self.rules = bundle, rules

    def without(self, rules: Sequence[str]) -> Path:
        if "pack_qkv" in rules:
            raise TargetError("the source is another model")
        return self.bundle

    def drop(self, rules: Sequence[str]) -> None:
        raise ParityError(f"the graph without {rules[0]} is another model")


def test_nothing_is_exported_again_where_every_fusion_pays(
    bundle: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenedChoice, "seconds", lambda opened: 1.0 if opened.bundle == bundle else 1.1)
    monkeypatch.setattr(Faulty, "drop", lambda *_: pytest.fail("it was exported again"))
    found = tune(bundle, fusions=Faulty(made, ["silu"]), drop_slow_fusions=True)
    assert (found.dropped, [trial.verdict for trial in found.trials]) == ((), ["left: slower"])


def test_a_variant_that_fails_is_said_and_what_cannot_be_dropped_stays(
    bundle: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenedChoice, "seconds", lambda opened: 1.0 if opened.bundle == bundle else 0.5)
    options: dict[str, Any] = {"prompt_tokens": 8, "new_tokens": 2, "fusions": Faulty(made)}
    found = tune(bundle, **options, drop_slow_fusions=True)
    refused, failed = found.trials
    assert refused.verdict == "left: it cannot be made or opened (the source is another model)"
    assert failed.verdict == "left: the bundle cannot be exported without it (the graph without silu is another model)"
    assert (found.dropped, refused.kept, failed.kept) == ((), False, False)
    found = tune(bundle, **options, max_seconds=0)
    assert {trial.verdict for trial in found.trials} == {"not measured: no time was left"}


def test_dropping_needs_a_source(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TuneError, match=r"from its source; give fusions \(--against SOURCE\)"):
        tune(bundle, drop_slow_fusions=True)
    assert main(["tune", str(bundle), "--drop-slow-fusions"]) == 2
    assert "give its source with --against" in capsys.readouterr().err
    assert not (bundle / TUNING_FILE).exists()


def test_fusions_of_another_model_are_refused(bundle: Path, sources: dict[str, str], tmp_path: Path) -> None:
    variants = FusionVariants(bundle, sources["gemma"], tmp_path / "place")
    with pytest.raises(TargetError, match=r"is another model than .*: their configurations differ; give the SOURCE"):
        variants.without(["silu"])


def test_bundles_whose_weights_would_be_chosen_anew_are_refused(bundle: Path, tmp_path: Path) -> None:
    account = json.loads((bundle / FUSIONS_FILE).read_text())
    (bundle / FUSIONS_FILE).write_text(json.dumps(account | {"calibration": "mine.txt"}))
    with pytest.raises(TargetError, match=r"was calibrated on mine\.txt, which it does not hold"):
        FusionVariants(bundle, "any", tmp_path)
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    (bundle / MANIFEST_FILE).write_text(json.dumps(manifest | {"precision": "auto"}))
    with pytest.raises(TargetError, match="bits would be chosen anew; leave --against out"):
        FusionVariants(bundle, "any", tmp_path)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"counts": 3}'])
def test_a_bundle_whose_account_of_fusions_is_damaged_is_refused(
    text: str | None, bundle: Path, tmp_path: Path
) -> None:
    (bundle / FUSIONS_FILE).unlink()
    if text is not None:
        (bundle / FUSIONS_FILE).write_text(text)
    with pytest.raises(
        ManifestError, match=rf"{FUSIONS_FILE} is missing or damaged .*; restore it, or leave --against"
    ):
        FusionVariants(bundle, "any", tmp_path)


def test_a_text_of_ones_own_is_named_in_the_account(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("Some words to calibrate on. " * 200, encoding="utf-8")
    source = write_tiny_source(tmp_path / "model.gguf")
    made = export(source, tmp_path / "bundle", precision="int4", calibration=text, verify=False)
    assert json.loads((made.path / FUSIONS_FILE).read_text())["calibration"] == "mine.txt"
