"""Prompts with float32 products in a second session: nearer to the original, and otherwise as before."""

import dataclasses
import functools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from parity import TOLERANCES
from tiny_graphs import make_block, make_config, make_model
from tiny_models import attention, block, decoder, tiny_model, token_ids

import graphport.export.model_export as export_module
from graphport.cli import main
from graphport.export.model_export import export
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.signature import decoder_signature
from graphport.runtime import (
    GenerationOutput,
    LanguageModel,
    SamplingParams,
    load_language_model,
    opening,
    prepare,
    probe_product,
)
from graphport.runtime.memory import NotEnoughMemoryError
from graphport.runtime.prefill_products import FLOAT_CHUNK, FLOAT_ENTRIES, FLOAT_STEP
from graphport.runtime.speculation import LONGEST_DRAFT
from graphport.runtime.tuning_trial import OpenedChoice, tune, write_tuning

CHUNK = FLOAT_STEP + 16
CONTEXT = 4 * CHUNK
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, logprobs=3, ignore_eos=True)
OPTIONS: dict[str, Any] = {"prefill_products": "float32", "prefill_chunk": CHUNK, "max_batch": 3, "threads": 1}
TOLERANCE = TOLERANCES["quantised, exact activations", "float32"]

Bundles = Callable[..., Path]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """The folder of a bundle of one model, a layer with a window and one without, by options; all from one trace."""
    model = tiny_model(decoder(block(of=attention(window=21)), block(), max_positions=CONTEXT))
    traced = torch_to_onnx(CachedDecoder(model, max_length=CONTEXT), decoder_signature(model.config))

    @functools.cache
    def exported(**options: Any) -> Path:
        out = tmp_path_factory.mktemp("products") / "bundle"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(export_module, "torch_to_onnx", lambda *_: traced.clone())
            return export(model, out, **{"precision": "int4", "verify": False, **options}).path

    return exported


@pytest.fixture(scope="module")
def folder(exported: Bundles) -> Path:
    return exported()


@pytest.fixture(scope="module")
def alone(folder: Path) -> LanguageModel:
    return load_language_model(folder, **OPTIONS)


def ids(length: int, seed: int = 1) -> list[int]:
    return [int(i) for i in token_ids(length, seed=seed)]


def prompts() -> list[list[int]]:
    return [ids(length, seed=length) for length in (5, 2 * CHUNK + 3, 31, 3 * CHUNK, CHUNK, CHUNK + FLOAT_STEP)]


def one_by_one(lm: LanguageModel) -> list[GenerationOutput]:
    return [lm.generate([prompt], GREEDY)[0] for prompt in prompts()]


def rows_of(lm: LanguageModel, text: list[int]) -> np.ndarray[Any, np.dtype[Any]]:
    """All that is cached of `text`, flat."""
    return np.concatenate([rows.ravel() for rows in lm.prefill(text).rows])


def difference(lm: LanguageModel, other: LanguageModel, text: list[int]) -> float:
    return float(np.abs(rows_of(lm, text) - rows_of(other, text)).max())


def test_long_steps_cache_the_rows_of_exact_activations(
    folder: Path, alone: LanguageModel, exported: Bundles, caplog: pytest.LogCaptureFixture
) -> None:
    """Short steps are those of the bundle as it is, to the bit; the head, of 8 bits, always is."""
    plain = OPTIONS | {"prefill_products": "as_exported"}
    with (
        load_language_model(folder, **plain) as rounded,
        load_language_model(exported(accuracy_level=0), **plain) as exact,
    ):
        assert "its 8-bit products take activations as they are (accuracy_level 0)" in caplog.text
        text, short = ids(3 * CHUNK), ids(FLOAT_STEP - 1)
        assert difference(alone, exact, text) <= TOLERANCE
        assert difference(rounded, exact, text) > 100 * TOLERANCE
        assert difference(alone, rounded, short) == 0
        assert difference(alone, exact, short) > 100 * TOLERANCE
        assert alone.generate([short], GREEDY) == rounded.generate([short], GREEDY)


def test_quantised_caches_of_whole_texts_and_of_windows_are_appended_to(exported: Bundles) -> None:
    """A value half-way between two levels may go to either; without float32 products a tenth of them move."""
    plain = OPTIONS | {"prefill_products": "as_exported"}
    with (
        load_language_model(exported(kv_cache="int8"), **OPTIONS) as lm,
        load_language_model(exported(kv_cache="int8"), **plain) as rounded,
        load_language_model(exported(kv_cache="int8", accuracy_level=0), **plain) as exact,
    ):
        assert lm.manifest.window_layers == (0,)
        wanted = rows_of(exact, ids(3 * CHUNK))
        moved, moved_rounded = (np.mean(rows_of(one, ids(3 * CHUNK)) != wanted) for one in (lm, rounded))
        assert 20 * moved < moved_rounded


def test_a_prompt_ends_with_a_short_step_as_exported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk with float32 products, then 5 tokens with those of the bundle: as a session does that is told to."""
    text = np.array([ids(CHUNK + 5)])
    with load_language_model(folder, **OPTIONS) as lm:
        wanted = lm.logits(text.tolist())[0][-5:]
        engine = lm._engine
        assert engine is not None
        cache = engine.session.new_cache(max_slots=1, max_length=CONTEXT)
        cache.claim()
        engine.session.step(cache, text[:, :CHUNK])
        monkeypatch.setattr(engine.session, "_prefill_runner", None)
        np.testing.assert_array_equal(engine.session.step(cache, text[:, CHUNK:], np.arange(5)), wanted)


def test_drafts_are_shorter_than_any_step_with_float32_products() -> None:
    assert 1 + LONGEST_DRAFT < FLOAT_STEP <= FLOAT_CHUNK


def test_neighbours_do_not_change_a_bit(folder: Path, alone: LanguageModel) -> None:
    expected = one_by_one(alone)
    with load_language_model(folder, **OPTIONS) as lm:
        assert lm.generate(prompts(), GREEDY) == expected
    with load_language_model(folder, **OPTIONS | {"prefill_chunk": FLOAT_STEP}) as other:
        assert one_by_one(other) != expected  # cut elsewhere: the comparison can fail


def test_b102_what_is_cached_does_not_change_a_bit(folder: Path, alone: LanguageModel) -> None:
    expected = one_by_one(alone)
    with load_language_model(folder, **OPTIONS, prefix_cache_bytes=1 << 22) as lm:
        for _ in range(2):
            assert one_by_one(lm) == expected
        found = lm.statistics.prefix_cache
        assert found is not None
        assert found.num_reused_tokens > 2 * CHUNK
        for prompt, output in zip(prompts(), expected, strict=True):
            state = lm.prefill(prompt)
            assert lm.generate([prompt], GREEDY, state=state) == [output]
            assert lm.generate([prompt], GREEDY, state=state.rewind(len(prompt) // 2)) == [output]


def test_a_state_of_other_products_is_refused(folder: Path, alone: LanguageModel, tmp_path: Path) -> None:
    alone.prefill(ids(CHUNK + 9)).save(tmp_path / "state")
    assert alone.restore(tmp_path / "state").num_prompt_tokens == CHUNK + 9
    with (
        load_language_model(folder, **OPTIONS | {"prefill_products": "as_exported"}) as other,
        pytest.raises(ValueError, match="its prefill_products is 'float32', this one's 'as_exported'"),
    ):
        other.restore(tmp_path / "state")


def test_the_graph_packed_for_the_processor_decodes_and_the_second_session_prefills(
    folder: Path, alone: LanguageModel, tmp_path: Path
) -> None:
    packed = Path(shutil.copytree(folder, tmp_path / "packed"))
    prepare(packed)
    with load_language_model(packed, **OPTIONS) as lm:
        assert (lm.is_prepared, lm.prefill_products) == (True, "float32")
        text = ids(CHUNK)
        assert difference(lm, alone, text) == 0


def test_steps_are_longer_by_default_and_the_log_says_what_runs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="graphport"),
        load_language_model(folder, prefill_products="float32") as lm,
    ):
        assert lm.prefill_chunk == FLOAT_CHUNK
    said = f"steps of {FLOAT_STEP} prompt tokens and more have float32 products"
    assert said in " ".join(record.getMessage() for record in caplog.records)


def test_what_the_second_session_takes_is_planned(folder: Path, alone: LanguageModel) -> None:
    with load_language_model(folder, **OPTIONS | {"prefill_products": "as_exported"}) as lm:
        plan, more = lm.memory_plan, alone.memory_plan
    assert (plan.float_products, more.cache) == (0, plan.cache)
    assert more.float_products > 0
    assert more.total > plan.total + more.float_products  # and a workspace of its own
    assert "float_products 0.0" in more.parts()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp32"}, "its matrices are not quantised, so its products are floats already"),
        ({"accuracy_level": 0}, r"its products have activations as they are already \(accuracy_level 0\)"),
        ({"precision": "int8"}, "its matrices have 8 bits, and the CPU's product with float activations is for 4"),
        ({"target": "cuda"}, "it was exported for cuda, and this is for bundles exported for the CPU"),
    ],
)
def test_bundles_that_cannot_have_them_are_refused(options: dict[str, Any], words: str, exported: Bundles) -> None:
    with pytest.raises(ValueError, match=f"prefill_products='float32' cannot be heeded by .*: {words}; leave it out"):
        load_language_model(exported(**options), device="cpu", prefill_products="float32")


@pytest.mark.parametrize("name", ["prefill_chunk", "max_length"])
def test_steps_that_are_never_long_enough_are_refused(name: str, folder: Path) -> None:
    options: dict[str, Any] = {"prefill_products": "float32", name: FLOAT_STEP - 1}
    with pytest.raises(ValueError, match=f"is for steps of 96 tokens and more, and {name} is 95; give {name} at least"):
        load_language_model(folder, **options)


def test_other_wishes_that_cannot_be_heeded_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="prefill_products must be as_exported or float32; got 'fp32'"):
        load_language_model(folder, prefill_products="fp32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefill_products must be as_exported or float32; got ''"):
        load_language_model(folder, prefill_products="")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="strict=True runs a bundle as it was certified, and prefill_products='float32'"
    ):
        load_language_model(folder, prefill_products="float32", strict=True)


def test_b91_an_entry_that_onnx_runtime_does_not_heed_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes names that it does not know without a word."""
    monkeypatch.setattr(opening, "FLOAT_ENTRIES", {"mlas.qnbit.force_fp33": "1"})
    with pytest.raises(
        ValueError, match=r"changes nothing: ONNX Runtime .* gives the same bits with and without it on this processor"
    ):
        load_language_model(folder, prefill_products="float32")


def test_commands_take_them_and_say_so(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*arguments: str) -> dict[str, Any]:
        assert main([*arguments, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    floats = ["--prefill-products", "float32"]
    bench = ["bench", str(folder), "--prompt-lengths", "150", "--new-tokens", "3"]
    found = [answer(*bench, *options) for options in (floats, [])]
    assert [each["prefill_products"] for each in found] == ["float32", "as_exported"]
    assert [each["prefill_chunk"] for each in found] == [FLOAT_CHUNK, 64]
    assert main([*bench, *floats]) == 0
    assert f"prompts in steps of {FLOAT_CHUNK} tokens, float32 products" in capsys.readouterr().err
    (tmp_path / "ids.json").write_text(json.dumps(ids(250)))
    text = ["eval", str(folder), str(tmp_path / "ids.json")]
    scored = [answer(*text, *options) for options in (floats, [])]
    assert [each["prefill_products"] for each in scored] == ["float32", "as_exported"]
    assert scored[0]["perplexity"] != scored[1]["perplexity"]
    planned = answer("plan", str(folder), *floats)
    assert planned["bytes"]["float_products"] > 0
    assert answer("plan", str(folder))["bytes"]["float_products"] == 0
    assert main(["plan", f"{tmp_path}/model.py:make", *floats]) == 2
    assert "--prefill-products is for a BUNDLE" in capsys.readouterr().err


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose certificate is of a text of more than two chunks."""
    model = make_model(make_config(make_block(), make_block(), max_positions=2 * CHUNK + 32))
    return export(model, tmp_path_factory.mktemp("certified") / "bundle", precision="int4").path


def test_what_tune_chose_is_opened_planned_and_said_and_what_is_given_goes_before(
    certified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = Path(shutil.copytree(certified, tmp_path / "bundle"))
    found = tune(bundle, max_seconds=0)
    choice = dataclasses.replace(found.choice, prefill_products="float32", prefill_chunk=200)
    write_tuning(bundle, dataclasses.replace(found, choice=choice))

    def opened(**options: Any) -> tuple[str, int]:
        with load_language_model(bundle, **options) as lm:
            return lm.prefill_products, lm.prefill_chunk

    assert opened() == ("float32", 200)
    assert opened(prefill_products="float32", prefill_chunk=99) == ("float32", 99)
    assert opened(prefill_chunk=64) == opened(max_length=90) == ("as_exported", 64)
    assert opened(prefill_products="as_exported") == opened(tuned=False) == opened(strict=True) == ("as_exported", 64)
    for options, is_planned in (([], True), (["--prefill-products", "as_exported"], False)):
        assert main(["plan", str(bundle), *options, "--json"]) == 0
        assert (json.loads(capsys.readouterr().out)["bytes"]["float_products"] > 0) is is_planned
    assert main(["report", str(bundle), "--json"]) == 0
    assert "200 prompt tokens a step with float32 products" in json.loads(capsys.readouterr().out)["tuning"]["words"]


def test_where_the_second_session_does_not_fit_the_refusal_says_what_would(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "free_memory", lambda: 1000)
    with pytest.raises(NotEnoughMemoryError, match="free memory there, give prefill_products='as_exported', or export"):
        load_language_model(folder, prefill_products="float32")


def test_tune_measures_them_on_the_bundle(certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted times: a request is faster with them, and fastest in the largest steps that it has room for."""
    bundle = Path(shutil.copytree(certified, tmp_path / "bundle"))
    speed = {"as_exported": 2.0, "float32": 1.0}
    monkeypatch.setattr(OpenedChoice, "seconds", lambda opened: speed[opened._session.prefill_products])
    found = tune(bundle, prompt_tokens=CHUNK + 20, new_tokens=4)
    trial = next(trial for trial in found.trials if "float32" in trial.what)
    assert (trial.what, trial.kept) == (f"prompts with float32 products, {FLOAT_CHUNK} tokens a step", True)
    assert trial.more_bytes is not None
    assert trial.more_bytes > 0
    assert found.choice.prefill_products == "float32"


def test_the_probe_is_the_product_that_onnx_says_and_tells_entries_apart(tmp_path: Path) -> None:
    matrix = np.arange(probe_product._N * 32, dtype=np.uint8).reshape(probe_product._N, 2, 16)
    scales = np.linspace(0.5, 1.0, 2 * probe_product._N, dtype=np.float32)
    (tmp_path / "probe.onnx").write_bytes(probe_product._model(matrix, scales))
    model = onnx.load(tmp_path / "probe.onnx")
    onnx.checker.check_model(model)
    (node,) = model.graph.node
    assert {attribute.name: attribute.i for attribute in node.attribute}["accuracy_level"] == 4
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(model.graph.initializer[0]), matrix)
    assert probe_product.changes_product(FLOAT_ENTRIES)
    assert not probe_product.changes_product({"session.force_spinning_stop": "1"})
