"""`verify --invariance`: answers do not depend on what surrounds a request, and each check sees what breaks it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_graphs import tiny_model

from graphport.cli import main
from graphport.export import export
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.cache_growth import Growth
from graphport.runtime.generation_output import GenerationOutput
from graphport.runtime.invariance import OTHER_SHAPES, ROUNDED, answer_difference, check_invariance
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.sampling import Sample
from graphport.runtime.session import Session
from graphport.runtime.step_tensors import StepTensors

NAMES = {
    "earlier requests",
    "batch neighbours",
    "row order",
    "padding",
    "chunk size 1",
    "chunk size 7",
    "max_length",
    "thread count",
    "replay",
    "rewind",
    "cache growth",
    "prefix reuse",
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    made = {"fp32": ("gemma", {}), "int8": ("llama", {}), "cache": ("llama", {"kv_cache": "int8"})}
    for name, (kind, options) in made.items():
        precision = "int8" if name == "int8" else "fp32"
        export(tiny_model(kind), folder / name, precision=precision, verify=name == "fp32", **options)
    return {name: folder / name for name in made}


def measured(folder: Path) -> dict[str, tuple[float, float]]:
    ids = np.random.default_rng(0).integers(61, size=64).tolist()
    checks = check_invariance(open_bundle(folder), ids, device="cpu", threads=1)
    assert all(check.inputs and check.detail for check in checks)
    return {check.name.removeprefix("invariance: "): (check.measured, check.tolerance) for check in checks}


def failed(folder: Path) -> set[str]:
    return {name for name, (value, tolerance) in measured(folder).items() if not value <= tolerance}


@pytest.mark.parametrize("kind", ["fp32", "int8", "cache"])
def test_b101_what_surrounds_a_request_changes_nothing(kind: str, bundles: dict[str, Path]) -> None:
    found = measured(bundles[kind])
    assert found.keys() == NAMES
    assert all(value <= tolerance for value, tolerance in found.values()), found
    assert found["batch neighbours"][1] == (OTHER_SHAPES if kind == "fp32" else ROUNDED)


def forget_rewind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "rewind", lambda *_: None)


def forget_claim(patch: pytest.MonkeyPatch) -> None:
    """A slot keeps the first token of whoever had it before."""

    def claim(self: KVCache) -> int:
        self.num_active += 1
        self.lengths[self.num_active - 1] = min(self.lengths[self.num_active - 1], 1)
        return self.num_active - 1

    patch.setattr(KVCache, "claim", claim)


def copy_nothing(patch: pytest.MonkeyPatch) -> None:
    def copy_slot(self: KVCache, source: int, target: int) -> None:
        self.lengths[target] = self.lengths[source]
        for buffer in self.buffers:
            buffer.array[target] = 0  # type: ignore[attr-defined]

    patch.setattr(KVCache, "copy_slot", copy_slot)


def grow_empty(patch: pytest.MonkeyPatch) -> None:
    take = KVCache._take

    def broken(self: KVCache, growth: Growth) -> None:
        take(self, growth)
        for buffer in self.buffers:
            buffer.array[:] = 0  # type: ignore[attr-defined]

    patch.setattr(KVCache, "_take", broken)


def share_lengths(patch: pytest.MonkeyPatch) -> None:
    """Every row of a batch is taken to be as long as the first."""
    write = StepTensors.write

    def broken(self: StepTensors, ids: Any, seqlens: Any, rows: Any, **counts: Any) -> None:
        write(self, ids, np.full_like(seqlens, seqlens[0]), rows, **counts)

    patch.setattr(StepTensors, "write", broken)


def last_row_for_all(patch: pytest.MonkeyPatch) -> None:
    """A chunk that follows another attends as if it began a token later."""
    run = Session._run

    def broken(self: Session, cache: KVCache, ids: Any, rows: Any, first_slot: int, **options: Any) -> Any:
        lengths = cache.lengths.copy()
        if ids.shape[1] > 1:
            cache.lengths[first_slot] += cache.lengths[first_slot] > 0
        outputs = run(self, cache, ids, rows, first_slot, **options)
        cache.lengths[:] = lengths
        return outputs

    patch.setattr(Session, "_run", broken)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = {
    "rewind forgotten": (forget_rewind, {"replay", "rewind"}),
    "a slot is not emptied": (forget_claim, {"earlier requests"}),
    "rows that are not copied": (copy_nothing, {"prefix reuse"}),
    "rows lost when the cache grows": (grow_empty, {"batch neighbours"}),
    "rows of one length": (share_lengths, {"batch neighbours", "padding", "row order"}),
    "chunks one off": (last_row_for_all, {"chunk size 7"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_the_check_that_sees_it(
    fault: str, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, names = FAULTS[fault]
    plant(monkeypatch)
    assert names <= failed(bundles["fp32"])


def output(*steps: tuple[int, dict[int, float]]) -> GenerationOutput:
    samples = tuple(Sample(token_id=token, logprob=top[token], top_logprobs=tuple(top.items())) for token, top in steps)
    ids = tuple(token for token, _ in steps)
    return GenerationOutput(text="", token_ids=ids, finish_reason="length", prompt_token_ids=(1,), logprobs=samples)


def test_another_token_counts_as_half_the_lead_that_the_first_answer_gave_its_own() -> None:
    wanted = output((3, {3: -0.5, 4: -1.0}), (5, {5: -0.1, 6: -4.0}))
    assert answer_difference(wanted, wanted) == 0
    assert answer_difference(wanted, output((3, {3: -0.5, 4: -1.25}), (5, {5: -0.1, 6: -4.0}))) == 0.25
    near = output((4, {3: -0.5, 4: -0.5}), (9, {9: -0.1, 6: -4.0}))
    assert answer_difference(wanted, near) == 0.5  # the logit moved by 0.5; the tokens that follow do not count
    assert answer_difference(wanted, output((3, {3: -0.5, 4: -1.0}), (6, {5: -0.1, 6: -4.0}))) == pytest.approx(1.95)
    assert answer_difference(wanted, output((3, {3: -0.5, 4: -1.0}), (8, {8: -0.1, 9: -4.0}))) == pytest.approx(1.95)


def test_a_bundle_without_room_is_refused(bundles: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="needs room for 16 tokens, got 15"):
        check_invariance(open_bundle(bundles["fp32"]), [1] * 15)


def test_the_command_adds_the_checks_and_its_status_is_theirs(
    bundles: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["verify", str(bundles["fp32"]), "--invariance", "--json", "--device", "cpu"]) == 0
    names = {check["name"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {f"invariance: {name}" for name in NAMES} <= names
    assert "prefill: max_abs against eager PyTorch" in names
    copy_nothing(monkeypatch)
    assert main(["verify", str(bundles["fp32"]), "--invariance", "--json", "--device", "cpu"]) == 1
