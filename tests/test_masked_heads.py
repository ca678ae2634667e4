"""Masked heads: every family against transformers, through bundles to `fill_mask`; what is refused."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import cuda_stubs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from parity import RELATIVE_TOLERANCES
from safetensors.torch import load_file, save_file
from test_parity_encoder import make_plan
from tiny_checkpoints import edit_json
from tiny_encoders import CONFIGS, SIZES, make_encoder, randomise, word_piece
from tokenizers import Tokenizer
from transformers import AutoModelForMaskedLM

from graphport.export import export
from graphport.export.bundle import write_graph
from graphport.export.model_kinds import ENCODER
from graphport.export.parity import ParityError
from graphport.export.pipeline import compile_graph
from graphport.export.source import open_source
from graphport.export.targets import CUDA
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.huggingface_heads import MASKED_HEADS
from graphport.model_def.position_config import ConfigError
from graphport.model_def.readout_config import MaskedHeadConfig
from graphport.model_def.signature import GRAPH_FILE, encoder_signature
from graphport.model_def.transformer import Transformer
from graphport.runtime import Encoder, load_encoder
from graphport.runtime.graph_checks import SHAPE_OPS
from graphport.runtime.verification import verify

EXPORTED = ("bert", "electra", "modernbert")  # token types, embeddings of their own width, rotary without biases
UNTIED = "electra"  # its head is exported with a matrix of its own
TEXTS = ("The capital of [MASK] is Paris.", "[MASK]", "[MASK], world! How [MASK] you today?")
CHANGES: dict[str, Any] = {"modernbert": {"norm_bias": True}}


@functools.cache
def _tokenizer() -> Tokenizer:
    """One for all: training it again may number pieces otherwise."""
    tokenizer = word_piece()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@functools.cache
def make_masked(model_type: str, *, tied: bool = True) -> Any:
    config_class, fixed = CONFIGS[model_type]
    sizes = {key: value for key, value in SIZES.items() if key in config_class().to_dict()}
    changes = {"tie_word_embeddings": tied, **CHANGES.get(model_type, {})}
    config = config_class(**(sizes | fixed | changes))
    config._attn_implementation = "eager"
    return randomise(AutoModelForMaskedLM.from_config(config).eval())


def save_masked(folder: Path, model_type: str, *, tied: bool = True) -> Path:
    make_masked(model_type, tied=tied).save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]"}))
    return folder


def _reference(model_type: str, ids: list[int], *, tied: bool = True) -> np.ndarray:
    """Logits [S, V] of transformers."""
    with torch.inference_mode():
        return make_masked(model_type, tied=tied)(torch.tensor([ids])).logits[0].numpy()


def _assert_near(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < RELATIVE_TOLERANCES["checkpoint", "float32"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("masked")
    return {kind: save_masked(folder / kind, kind, tied=kind != UNTIED) for kind in EXPORTED}


@pytest.fixture(scope="module")
def bundles(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return {kind: export(source, folder / kind, precision="fp32").path for kind, source in sources.items()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", sorted(MASKED_HEADS))
def test_a_checkpoint_scores_the_vocabulary_as_transformers_does(model_type: str, tied: bool, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(save_masked(tmp_path, model_type, tied=tied))
    head = checkpoint.config.masked_head
    assert head is not None
    assert head.tied == tied
    assert head.mask_id == _tokenizer().token_to_id("[MASK]")
    model = Transformer(checkpoint.config).eval()
    model.load_state_dict(checkpoint.weights, strict=True)
    ids = [*range(5, 30), 4, 9]
    with torch.inference_mode():
        assert model.masked_head is not None
        found = model.masked_head(model(torch.tensor([ids]))[0], model.embedding.weight).numpy()
    wanted = _reference(model_type, ids, tied=tied)
    _assert_near(found, wanted)
    for wrong in (found[::-1], np.roll(found, 1, axis=1), np.zeros_like(found)):
        with pytest.raises(AssertionError):
            _assert_near(wrong, wanted)


@pytest.mark.parametrize("kind", EXPORTED)
def test_masked_places_of_any_texts_equal_transformers(kind: str, bundles: dict[str, Path]) -> None:
    mask = _tokenizer().token_to_id("[MASK]")
    rows = [*(_tokenizer().encode(text).ids for text in TEXTS), [7, mask, 9, mask, mask]]
    wanted = [
        _reference(kind, row, tied=kind != UNTIED)[[column for column, token in enumerate(row) if token == mask]]
        for row in rows
    ]
    with load_encoder(bundles[kind], max_batch=3) as encoder:
        for found, logits in zip(encoder.masked_logits([*TEXTS, rows[-1]]), wanted, strict=True):
            _assert_near(found, logits)
        alone = encoder.masked_logits([TEXTS[2]], batch_size=1)
        _assert_near(alone[0], wanted[2])
        filled = encoder.fill_mask(TEXTS, top_k=3)
        assert [len(places) for places in filled] == [1, 1, 2]
        for place, logits in zip(filled[2], wanted[2], strict=True):
            shares = torch.tensor(logits).softmax(-1)
            best = shares.topk(3)
            assert [candidate.token_id for candidate in place] == best.indices.tolist()
            assert [candidate.probability for candidate in place] == pytest.approx(best.values.tolist(), rel=1e-4)
            assert place[0].token == _tokenizer().decode([place[0].token_id], skip_special_tokens=False)
        assert encoder.fill_mask([]) == []
        assert [len(states) for states in encoder.hidden_states(TEXTS)] == [len(row) for row in rows[:3]]


@pytest.mark.parametrize("kind", EXPORTED)
def test_bundles_with_a_masked_head_are_certified(kind: str, bundles: dict[str, Path]) -> None:
    result = verify(bundles[kind], device="cpu", threads=1)
    assert result.passed
    assert any(check.name.startswith("padded batch, logits") for check in result.checks)


def test_a_head_in_int8_shares_the_table_of_the_embeddings(sources: dict[str, Path], tmp_path: Path) -> None:
    bundle = export(sources["bert"], tmp_path / "out", precision="int8")
    with load_encoder(bundle.path) as encoder:
        found = encoder.masked_logits(TEXTS)[0][0]
    row = _tokenizer().encode(TEXTS[0]).ids
    wanted = _reference("bert", row)[row.index(_tokenizer().token_to_id("[MASK]"))]
    cosine = float(found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted))
    assert 0.98 < cosine < 0.9999999
    tables = [name for name in ir.load(bundle.path / GRAPH_FILE).graph.initializers if name.startswith("embedding.")]
    assert sorted(tables) == ["embedding.weight_q8", "embedding.weight_scales"]


def test_a_head_of_shifted_rows_is_rejected_and_all_lands_on_cuda(
    sources: dict[str, Path], tmp_path: Path, cuda: cuda_stubs.Placer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_source(sources["bert"], seed=0).model
    graph = torch_to_onnx(ENCODER.module(model, 64), encoder_signature(model.config))
    placed = graph.clone()
    compile_graph(placed, make_plan(model.config, CUDA, "fp16"))
    write_graph(placed, tmp_path)
    placement = cuda.place(tmp_path / GRAPH_FILE)
    assert set(placement.cpu) <= set(SHAPE_OPS)
    bias = graph.graph.initializers["masked_head.bias"]
    assert bias.const_value is not None
    values = np.roll(bias.const_value.numpy(), 1)
    bias.const_value = ir.tensor(values, name="masked_head.bias")
    monkeypatch.setattr("graphport.export.model_export.torch_to_onnx", lambda *_: graph)
    with pytest.raises(ParityError, match="exported: 8 texts in one padded batch, relative"):
        export(model, tmp_path / "out", precision="fp32")


def test_what_has_no_masked_place_or_no_head_is_refused(
    bundles: dict[str, Path], sources: dict[str, Path], tmp_path: Path
) -> None:
    with load_encoder(bundles["bert"]) as encoder:
        assert isinstance(encoder, Encoder)
        with pytest.raises(
            ValueError, match="text 1 has no masked place; write the mask token where a token is missing"
        ):
            encoder.fill_mask([TEXTS[0], "nothing is missing"])
        with pytest.raises(ValueError, match="no vector a text; use fill_mask"):
            encoder.encode(TEXTS)
        with pytest.raises(ValueError, match="top_k must be 1 to 300, the vocabulary; got 301"):
            encoder.fill_mask(TEXTS, top_k=301)
        with pytest.raises(ValueError, match="has no classifier; use fill_mask"):
            encoder.classify(TEXTS)
    source = Path(shutil.copytree(sources["bert"], tmp_path / "unnamed"))
    (source / "tokenizer_config.json").unlink()
    unnamed = export(source, tmp_path / "out", precision="fp32", verify=False)
    with load_encoder(unnamed.path) as encoder, pytest.raises(ValueError, match="names no mask_token; add it and"):
        encoder.fill_mask(TEXTS)
    make_encoder("bert").save_pretrained(tmp_path / "plain")
    plain = export(tmp_path / "plain", tmp_path / "embeds", precision="fp32", verify=False)
    with load_encoder(plain.path) as encoder, pytest.raises(ValueError, match="has no masked head; use encode"):
        encoder.fill_mask([[3, 4]])


def test_a_matrix_of_its_own_is_rounded_apart_from_the_embeddings(sources: dict[str, Path], tmp_path: Path) -> None:
    bundle = export(sources[UNTIED], tmp_path / "out", precision="int4")
    stored = ir.load(bundle.path / GRAPH_FILE).graph.initializers
    assert {name for name in stored if name.startswith("masked_head.weight")} == {
        "masked_head.weight_q8",
        "masked_head.weight_scales",
    }
    with load_encoder(bundle.path) as encoder:
        found = encoder.masked_logits(TEXTS)[0][0]
    row = _tokenizer().encode(TEXTS[0]).ids
    wanted = _reference(UNTIED, row, tied=False)[row.index(_tokenizer().token_to_id("[MASK]"))]
    assert 0.9 < float(found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted)) < 0.9999999


def test_tensors_that_contradict_the_flag_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(sources["bert"], tmp_path / "bert"))
    tensors = load_file(source / "model.safetensors")
    decoder, embedding = "cls.predictions.decoder", tensors["bert.embeddings.word_embeddings.weight"]
    save_file({**tensors, f"{decoder}.weight": embedding + 1}, source / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"decoder\.weight and .*word_embeddings\.weight are different .* false in"
    ):
        load_checkpoint(source)
    save_file({**tensors, f"{decoder}.bias": tensors["cls.predictions.bias"] + 1}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"decoder\.bias and cls\.predictions\.bias are different tensors, but"):
        load_checkpoint(source)
    edit_json(source / "config.json", lambda values: values.update(tie_word_embeddings=False))
    with pytest.raises(
        CheckpointError, match=r"is false and cls\.predictions\.decoder\.weight is missing; set the flag"
    ):
        load_checkpoint(source)


def test_a_bias_stored_once_is_the_outputs(sources: dict[str, Path], tmp_path: Path) -> None:
    """transformers before 5 shared the two and stored one, of tied heads and of others."""
    source = Path(shutil.copytree(sources["bert"], tmp_path / "bert"))
    tensors = load_file(source / "model.safetensors")
    bias, own = tensors["cls.predictions.bias"], "cls.predictions.decoder"
    rest = {name: tensor for name, tensor in tensors.items() if name != "cls.predictions.bias"}
    save_file({**rest, f"{own}.bias": bias}, source / "model.safetensors")
    assert torch.equal(load_checkpoint(source).weights["masked_head.bias"], bias)
    matrix = tensors["bert.embeddings.word_embeddings.weight"] + 1
    save_file({**tensors, f"{own}.weight": matrix}, source / "model.safetensors")
    edit_json(source / "config.json", lambda values: values.update(tie_word_embeddings=False))
    untied = load_checkpoint(source)
    assert torch.equal(untied.weights["masked_head.bias"], bias)
    assert torch.equal(untied.weights["masked_head.weight"], matrix)
    assert any("decoder.bias is not stored; cls.predictions.bias" in note for note in untied.notes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"width": 0}, "masked head width must be"),
        ({"transform": "sin"}, "masked head transform must be one of"),
        ({"epsilon": 0.0}, "masked head epsilon must be a positive number"),
    ],
)
def test_heads_that_contradict_themselves_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        MaskedHeadConfig(**{"width": 8, "transform": "gelu", "epsilon": 1e-5, **changes})
