"""`encode` on bundles: equals PyTorch, whatever the order and the neighbours; what is refused; batches; threads."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import assert_parity
from tiny_encoders import TEXTS, make_encoder, reference_states, save_sentence_folder
from tiny_models import decoder, tiny_encoder_configs, tiny_model

from graphport.export import export
from graphport.runtime import Encoder, LanguageModel, load, load_encoder, load_language_model
from graphport.runtime.encoder_batches import cut_batches
from graphport.runtime.memory import NotEnoughMemoryError

IDS = [[5, 7, 9], [8], list(range(3, 30)), [4] * 12]


@pytest.fixture(scope="module")
def model() -> Any:
    return make_encoder("bert")


@pytest.fixture(scope="module")
def bundles(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoder")
    source = save_sentence_folder(folder / "source", model)
    for precision in ("fp32", "int8"):
        export(source, folder / precision, precision=precision, verify=precision == "int8")
    return {precision: folder / precision for precision in ("fp32", "int8")}


@pytest.fixture(scope="module")
def encoder(bundles: dict[str, Path]) -> Encoder:
    return load_encoder(bundles["fp32"], threads=1)


def _reference(model: Any, ids: list[int]) -> np.ndarray:
    mean = reference_states(model, ids).mean(0)
    return (mean / mean.norm()).numpy()


def test_vectors_equal_transformers_in_the_order_of_the_texts(encoder: Encoder, model: Any) -> None:
    assert encoder.tokenizer is not None
    found = encoder.encode(TEXTS)
    assert found.dtype == np.float32
    assert found.shape == (len(TEXTS), 48)
    for text, vector in zip(TEXTS, found, strict=True):
        assert_parity(vector, _reference(model, encoder.tokenizer.encode(text)), "tiny bundle", what=text)
    assert_parity(
        encoder.encode([*IDS, np.array(IDS[0])])[:4], np.stack([_reference(model, i) for i in IDS]), "compiled"
    )
    with pytest.raises(AssertionError):
        assert_parity(encoder.encode(TEXTS[::-1]), found, "tiny bundle")


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_b57_b129_a_vector_does_not_depend_on_its_neighbours(precision: str, bundles: dict[str, Path]) -> None:
    """int8 rounds activations in blocks of 32 of one token, so neighbours change nothing there either."""
    with load_encoder(bundles[precision], threads=1) as encoder:
        alone = encoder.encode(["tokens"])
        for others in (["a"], ["the " * 28], ["", "x", *TEXTS]):
            for size in (1, 2, 32):
                together = encoder.encode([*others, "tokens"], batch_size=size)[-1:]
                assert_parity(together, alone, "reused cache")


@pytest.mark.parametrize("model_type", ["distilbert", "mpnet", "modernbert"])
def test_other_families_run_in_ragged_batches(model_type: str, tmp_path: Path) -> None:
    model = make_encoder(model_type)
    model.save_pretrained(tmp_path / "source")
    export(tmp_path / "source", tmp_path / "out", precision="fp32", verify=False)
    with load_encoder(tmp_path / "out", threads=1) as encoder:
        for ids, found in zip(IDS, encoder.hidden_states(IDS, batch_size=4), strict=True):
            assert_parity(found, reference_states(model, ids), "equal models")


def test_normalisation_is_the_recipes_unless_asked(encoder: Encoder, model: Any) -> None:
    plain = encoder.encode(IDS, normalize=False)
    assert_parity(plain[0], reference_states(model, IDS[0]).mean(0), "compiled")
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    assert_parity(encoder.encode(IDS), plain / lengths, "compiled")
    assert_parity(encoder.encode(IDS, normalize=True), encoder.encode(IDS), "reused cache")


def test_hidden_states_are_those_of_the_real_tokens(encoder: Encoder, model: Any) -> None:
    for ids, found in zip(IDS, encoder.hidden_states(IDS), strict=True):
        assert_parity(found, reference_states(model, ids), "compiled")


def test_no_text_gives_no_vector(encoder: Encoder) -> None:
    assert encoder.encode([]).shape == (0, 48)
    assert encoder.hidden_states([]) == []


def test_b129_long_texts_are_refused_or_cut_and_said(
    encoder: Encoder, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert encoder.tokenizer is not None
    assert encoder.max_length == 32
    text = "tokens " * 40
    ids = encoder.tokenizer.encode(text)
    with pytest.raises(ValueError, match=rf"text 1 has {len(ids)} tokens, more than max_length \(32\).*truncate=True"):
        encoder.encode(["short", text])
    with pytest.raises(ValueError, match=r"text 0 has 33 tokens, more than max_length \(32\)"):
        encoder.encode([[5] * 33])
    with caplog.at_level(logging.WARNING):
        found = encoder.encode(["short", text, [5] * 33], truncate=True)
    assert caplog.messages == ["2 of 3 texts were cut to 32 tokens"]
    assert_parity(found[1], _reference(model, [*ids[:31], ids[-1]]), "compiled")  # [SEP] stays
    assert_parity(found[2], _reference(model, [5] * 32), "compiled")


@pytest.mark.parametrize(
    ("texts", "options", "error", "reason"),
    [
        ("a text", {}, TypeError, r"texts must be a list of str .* got str; use \[text\]"),
        ([3], {}, TypeError, "text 0 is of type int; give a str or a list of ids"),
        ([[]], {}, ValueError, "text 0 is empty"),
        ([[1, 300]], {}, ValueError, "text 0 has id 300, outside the vocabulary: ids are 0 to 299"),
        ([[1.5]], {}, TypeError, r"text 0 holds 1.5 \(float\)"),
        (["\ud800"], {}, ValueError, "lone surrogate"),
        (["a"], {"batch_size": 0}, ValueError, "batch_size must be 1 to 32, max_batch of load; got 0"),
        (["a"], {"batch_size": 64}, ValueError, "batch_size must be 1 to 32, max_batch of load; got 64"),
    ],
)
def test_what_cannot_be_encoded_is_refused(
    texts: Any, options: dict[str, Any], error: type[Exception], reason: str, encoder: Encoder
) -> None:
    with pytest.raises(error, match=reason):
        encoder.encode(texts, **options)


def test_load_opens_what_the_manifest_says(bundles: dict[str, Path], tmp_path: Path) -> None:
    from tiny_models import block

    with load(bundles["fp32"], max_batch=2, max_length=16) as opened:
        assert isinstance(opened, Encoder)
        assert (opened.max_batch, opened.max_length, opened.device) == (2, 16, "cpu")
    with pytest.raises(RuntimeError, match="this Encoder is closed"):
        opened.encode(["a"])
    with pytest.raises(ValueError, match=r"prefill_chunk and cuda_graphs cannot be heeded: .* is an encoder"):
        load(bundles["fp32"], prefill_chunk=3, cuda_graphs=True)
    with pytest.raises(ValueError, match=r"prefill_products cannot be heeded: .* is an encoder"):
        load(bundles["fp32"], prefill_products="float32")
    with pytest.raises(ValueError, match="is an encoder, which continues no text; use load, and encode"):
        load_language_model(bundles["fp32"])
    export(tiny_model(decoder(block())), tmp_path / "decoder", precision="fp32", verify=False)
    with pytest.raises(ValueError, match="is a decoder, which embeds no text; use generate"):
        load_encoder(tmp_path / "decoder")
    with load(tmp_path / "decoder") as lm:
        assert isinstance(lm, LanguageModel)


def test_b99_what_a_bundle_lacks_is_filled_or_said(tmp_path: Path) -> None:
    """Token types are 0, as transformers fills them (all tests here); without tokenizer or pooling there is no text."""
    config = tiny_encoder_configs()["encoder_no_positions"]
    export(tiny_model(config), tmp_path / "out", precision="fp32", verify=False)
    with load_encoder(tmp_path / "out") as encoder:
        with pytest.raises(ValueError, match="no pooling, so no vector a text; use hidden_states"):
            encoder.encode([[1]])
        with pytest.raises(ValueError, match="text 0 is a str, and this bundle has no tokenizer"):
            encoder.hidden_states(["a"])
        assert encoder.hidden_states([[1, 2]])[0].shape == (2, 40)


def test_switches_are_true_or_false(encoder: Encoder, bundles: dict[str, Path], tmp_path: Path) -> None:
    wrong: Any = "x"
    with pytest.raises(TypeError, match=r"normalize must be True or False; got 'x' \(str\)"):
        encoder.encode(TEXTS, normalize=wrong)
    with pytest.raises(TypeError, match=r"truncate must be True or False; got 'x' \(str\)"):
        encoder.hidden_states(TEXTS, truncate=wrong)
    for name in ("strict", "tuned", "spinning", "prepared"):
        with pytest.raises(TypeError, match=rf"{name} must be True or False; got 'x' \(str\)"):
            load(bundles["fp32"], **{name: wrong})
    for name in ("verify", "require_exact", "force"):
        with pytest.raises(TypeError, match=rf"{name} must be True or False; got None \(NoneType\)"):
            export("nowhere", tmp_path / "out", **{name: None})


def test_an_overflowing_model_is_reported(tmp_path: Path) -> None:
    model = tiny_model(tiny_encoder_configs()["encoder_bert"])
    with torch.no_grad():
        model.layers[1].feed_forward_norm.weight.fill_(3e38)
    export(model, tmp_path / "out", precision="fp32", verify=False)
    with load_encoder(tmp_path / "out") as encoder, pytest.raises(FloatingPointError, match="the model overflowed"):
        encoder.encode([[1, 2, 3]])


def test_b93_threads_share_an_encoder(encoder: Encoder) -> None:
    wanted = encoder.encode(TEXTS)
    with ThreadPoolExecutor(max_workers=4) as executor:
        results = list(executor.map(lambda _: encoder.encode(TEXTS), range(12)))
    for found in results:
        assert np.array_equal(found, wanted)


def test_memory_is_planned_for_the_largest_batch(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    for rows in (1, 8):
        with load_encoder(bundles["fp32"], max_batch=rows) as encoder:
            plans.append(encoder.memory_plan)
    assert plans[0].cache == 0
    assert plans[1].workspace == 8 * plans[0].workspace
    assert plans[1].logits == 8 * plans[0].logits == 8 * 32 * 48 * 4
    monkeypatch.setattr("graphport.runtime.opening.free_memory", lambda: 1000)
    with pytest.raises(NotEnoughMemoryError, match=r"opening .* needs"):
        load_encoder(bundles["fp32"])


@pytest.mark.parametrize(
    ("lengths", "max_rows", "batches"),
    [
        ([], 4, []),
        ([3, 3, 3], 2, [[0], [1, 2]]),
        ([100, 100, 100, 100], 4, [[0, 1, 2, 3]]),
        ([2, 512, 2, 2], 4, [[1], [0, 2, 3]]),  # three runs of padding to 512 cost more than a run
        ([16, 17, 18], 4, [[2, 1, 0]]),  # little padding costs less than a run
    ],
)
def test_batches_are_cut_where_padding_costs_more_than_a_run(
    lengths: list[int], max_rows: int, batches: list[list[int]]
) -> None:
    assert cut_batches(lengths, max_rows=max_rows) == batches


def test_every_text_is_in_one_batch_and_padding_stays_small() -> None:
    lengths = np.random.default_rng(0).integers(1, 257, size=500).tolist()
    batches = cut_batches(lengths, max_rows=32)
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    assert max(map(len, batches)) <= 32
    computed = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
    assert computed < 1.05 * sum(lengths)
