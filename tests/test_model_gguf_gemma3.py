"""GGUF files of architecture gemma3: windows, two rotary bases, sandwich norms, scaled embeddings as transformers has.

The tiny files are written as llama.cpp's converter writes them; the real one is compared with transformers' own reader.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import RopeScalingType
from parity import RELATIVE_TOLERANCES
from test_model_gguf_tokenizer import CORPUS
from tiny_checkpoints import GEMMA3, make_model, relative_difference, token_ids, write_gguf

from graphport.model_def.checkpoint import load_checkpoint
from graphport.model_def.position_config import LinearScaling
from graphport.model_def.transformer import Transformer

TOLERANCE = RELATIVE_TOLERANCES["checkpoint", "float32"]


def _gemma3(**changes: Any) -> Any:
    return make_model("gemma3", **GEMMA3 | changes)


def _write_gemma3(path: Path, model: Any, edit: Callable[[gguf.GGUFWriter], None] = lambda _writer: None) -> Path:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(model.config.sliding_window)
        edit(writer)

    return write_gguf(path, model, edit=add)


@pytest.mark.parametrize("length", [4, 5, 6, 7, 20, 40])
def test_b25_gemma3_equals_transformers_on_both_sides_of_its_window(length: int, tmp_path: Path) -> None:
    model = _gemma3()
    checkpoint = load_checkpoint(_write_gemma3(tmp_path / "x.gguf", model))
    windows = [block.attention.window for block in checkpoint.config.blocks]
    assert windows == [5, 5, 5, 5, 5, None, 5]
    assert checkpoint.config.embedding_scale == 48**0.5
    assert relative_difference(checkpoint, model, token_ids(length)) < TOLERANCE


def test_b28_gemma3_with_outliers_equals_transformers_on_200_prompts(tmp_path: Path) -> None:
    """Two rows of the embedding 300 times larger; the worst prompt counts."""
    model = _gemma3()
    with torch.no_grad():
        model.model.embed_tokens.weight[[3, 17]] *= 300
    checkpoint = load_checkpoint(_write_gemma3(tmp_path / "x.gguf", model))
    ours = Transformer(checkpoint.config).eval()
    ours.load_state_dict(checkpoint.weights)
    ids = torch.randint(61, (200, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted, found = model(ids, use_cache=False).logits, ours(ids)
    scale = wanted.abs().amax(dim=(1, 2))
    assert float(((found - wanted).abs().amax(dim=(1, 2)) / scale).max()) < TOLERANCE


@pytest.mark.parametrize(
    ("broken", "length"),
    [
        ({"window": 6}, 12),  # one token more
        ({"window": None}, 12),
        ({"rotary": "full"}, 12),  # the base of the layers that see everything
        ({"scale": 0.2}, 4),
        ({"qk_norm": None}, 4),
    ],
)
def test_b25_a_gemma3_read_wrongly_is_rejected_by_the_same_comparison(
    broken: dict[str, Any], length: int, tmp_path: Path
) -> None:
    model = _gemma3()
    checkpoint = load_checkpoint(_write_gemma3(tmp_path / "x.gguf", model))
    rotary = checkpoint.config.blocks[5].attention.rotary
    changes = {key: rotary if value == "full" else value for key, value in broken.items()}
    blocks = list(checkpoint.config.blocks)
    blocks[2] = dataclasses.replace(blocks[2], attention=dataclasses.replace(blocks[2].attention, **changes))
    weights = {
        name: weight
        for name, weight in checkpoint.weights.items()
        if "qk_norm" not in broken
        or not name.startswith(("blocks.2.attention.query_norm", "blocks.2.attention.key_norm"))
    }
    config = dataclasses.replace(checkpoint.config, blocks=tuple(blocks))
    wrong = dataclasses.replace(checkpoint, config=config, weights=weights)
    assert relative_difference(wrong, model, token_ids(length)) > 10 * TOLERANCE


@pytest.mark.parametrize(
    ("edit", "windows"),
    [
        (lambda writer: writer.add_sliding_window_pattern(3), [5, 5, None, 5, 5, None, 5]),
        (lambda writer: writer.add_sliding_window_pattern(1), [None] * 7),
        (lambda writer: writer.add_sliding_window_pattern([True, False] * 3 + [True]), [5, None] * 3 + [5]),
    ],
)
def test_b27_a_stated_pattern_wins_over_the_architectures_own(
    edit: Callable[[gguf.GGUFWriter], None], windows: list[int | None], tmp_path: Path
) -> None:
    checkpoint = load_checkpoint(_write_gemma3(tmp_path / "x.gguf", _gemma3(), edit))
    assert [block.attention.window for block in checkpoint.config.blocks] == windows


def test_b27_without_a_window_every_layer_sees_everything(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(write_gguf(tmp_path / "x.gguf", _gemma3()))
    assert {block.attention.window for block in checkpoint.config.blocks} == {None}
    assert {block.attention.rotary for block in checkpoint.config.blocks} == {
        checkpoint.config.blocks[5].attention.rotary
    }


def test_gemma3_scaling_is_for_layers_that_see_everything_and_window_layers_have_a_base_of_their_own(
    tmp_path: Path,
) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(3.0)
        writer.add_float32("gemma3.rope.freq_base_swa", 2000.0)

    rope = {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0},
    }
    model = _gemma3(rope_parameters=rope)
    checkpoint = load_checkpoint(_write_gemma3(tmp_path / "x.gguf", model, edit))
    full, window = (checkpoint.config.blocks[layer].attention.rotary for layer in (5, 0))
    assert full is not None
    assert window is not None
    assert (full.theta, full.scaling) == (1e6, LinearScaling(factor=3.0))
    assert (window.theta, window.scaling) == (2000.0, None)
    assert relative_difference(checkpoint, model, token_ids(20)) < TOLERANCE


def test_gemma3_of_62_layers_scales_scores_by_hidden_size_over_heads(tmp_path: Path) -> None:
    model = _gemma3(num_hidden_layers=62, query_pre_attn_scalar=48 // 4, hidden_size=48)
    checkpoint = load_checkpoint(_write_gemma3(tmp_path / "x.gguf", model))
    assert {block.attention.scale for block in checkpoint.config.blocks} == {12**-0.5}
    assert relative_difference(checkpoint, model, token_ids(5)) < TOLERANCE


def test_gemma3_with_a_cap_on_its_logits_equals_transformers(tmp_path: Path) -> None:
    model = _gemma3(final_logit_softcapping=30.0)
    path = _write_gemma3(tmp_path / "x.gguf", model, lambda writer: writer.add_final_logit_softcapping(30.0))
    checkpoint = load_checkpoint(path)
    assert checkpoint.config.logit_softcap == 30.0
    assert relative_difference(checkpoint, model, token_ids(9)) < TOLERANCE


def test_gemma3_270m_equals_transformers_beyond_its_window(gemma3_gguf: Path) -> None:
    """Its own reader of the same file: measured 0 on 768 tokens of English."""
    from transformers import AutoModelForCausalLM

    from graphport.export.certify import eager_logits, parity_ids

    checkpoint = load_checkpoint(gemma3_gguf)
    assert checkpoint.config.head == "tied"
    assert [block.attention.window for block in checkpoint.config.blocks] == [*[512] * 5, None] * 3
    ours = Transformer(checkpoint.config).eval()
    ours.load_state_dict(checkpoint.weights, assign=True)
    ids = parity_ids(checkpoint.config, checkpoint.tokenizer_json, max_length=640, seed=0)
    found = eager_logits(ours, ids)
    theirs = AutoModelForCausalLM.from_pretrained(
        gemma3_gguf.parent, gguf_file=gemma3_gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        wanted = theirs.eval()(torch.tensor([ids])).logits[0].numpy()
    assert abs(found - wanted).max() <= TOLERANCE * abs(wanted).max()


def test_gemma3_270m_ids_equal_the_sentencepiece_library(gemma3_gguf: Path) -> None:
    """A SentencePiece model made of the file's pieces and scores; user-defined pieces are stored with plain spaces."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2
    from tokenizers import Tokenizer

    from graphport.export.calibration_text import CALIBRATION_TEXT
    from graphport.model_def.gguf_file import read_gguf_file
    from graphport.model_def.parity_text import PARITY_TEXT

    metadata = read_gguf_file(gemma3_gguf).metadata
    tokens, scores, kinds = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    model = sentencepiece_model_pb2.ModelProto()
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        model.pieces.add(piece=token.replace(" ", "▁") if kind == 4 else token, score=score, type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    for name, number in (("unk_id", 3), ("bos_id", 2), ("eos_id", 1), ("pad_id", 0)):
        setattr(model.trainer_spec, name, number)
    model.normalizer_spec.name = "identity"
    for name in ("add_dummy_prefix", "remove_extra_whitespaces"):
        setattr(model.normalizer_spec, name, False)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    mine = Tokenizer.from_str(load_checkpoint(gemma3_gguf).tokenizer_json or "")
    spaces = "two  three   \n\nlines\n\n\n \t\ttabs <table><tr>x</b>"
    for text in (*CORPUS, PARITY_TEXT, CALIBRATION_TEXT, spaces, "  leading", " \n \n"):
        ids = theirs.encode(text)
        assert mine.encode(text, add_special_tokens=False).ids == ids, text
        assert mine.encode(text).ids == [2, *ids]
        assert mine.decode(ids) == text
