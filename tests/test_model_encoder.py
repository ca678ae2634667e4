"""Encoders in PyTorch: the padded ops against formulas, checkpoints against transformers, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import RELATIVE_TOLERANCES, assert_parity
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json
from tiny_encoders import CONFIGS, make_encoder, reference_states, save_sentence_folder
from tiny_models import tiny_configs, tiny_encoder_configs, tiny_model, token_ids

from graphport.model_def.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from graphport.model_def.config import TransformerConfig
from graphport.model_def.encoder import Encoder
from graphport.model_def.ops import padded_attention, pool
from graphport.model_def.position_config import ConfigError
from graphport.model_def.readout_config import PoolingConfig
from graphport.model_def.transformer import Transformer

LENGTHS = torch.tensor([7, 1, 4], dtype=torch.int32)
KINDS = sorted(name for name, config in tiny_encoder_configs().items() if config.head == "none")


def _attend(hidden: torch.Tensor, lengths: torch.Tensor = LENGTHS) -> torch.Tensor:
    return padded_attention(
        hidden, hidden.roll(1, -1), hidden.roll(2, -1), lengths, None, None, None, 3, 3, 0.4, 0.0, False, False
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_equals_each_text_alone(kind: str) -> None:
    config = tiny_encoder_configs()[kind]
    model = tiny_model(config)
    ids, types = token_ids(3, 7), torch.randint(0, max(config.token_types, 1), (3, 7))
    encoder = Encoder(model, max_length=config.max_positions)
    with torch.inference_mode():
        found, *pooled = encoder(ids, LENGTHS, types if config.token_types > 1 else None)
        for row, length in enumerate(LENGTHS.tolist()):
            alone = model(ids[row : row + 1, :length], token_types=types[row : row + 1, :length])
            assert_parity(found[row, :length], alone[0], "equal models")
            if config.pooling is not None:
                wanted = pool(alone, LENGTHS[row : row + 1], config.pooling.kind)
                assert_parity(pooled[0][row], wanted[0], "equal models")
            shifted = model(ids[row : row + 1, :length].roll(1, 1), token_types=types[row : row + 1, :length])
            if length > 1:
                with pytest.raises(AssertionError):
                    assert_parity(found[row, :length], shifted[0], "equal models")


def test_b45_b46_padding_of_any_value_reaches_nothing_and_an_empty_row_is_finite() -> None:
    hidden = torch.randn(3, 7, 12) * 50  # scores of thousands
    expected = _attend(hidden)
    poisoned = hidden.clone()
    for row, length in enumerate(LENGTHS.tolist()):
        poisoned[row, length:] = float("nan")
    found = _attend(poisoned)
    for row, length in enumerate(LENGTHS.tolist()):
        assert torch.equal(found[row, :length], expected[row, :length])
    assert _attend(poisoned, torch.tensor([7, 0, 0], dtype=torch.int32)).isfinite().all()
    with pytest.raises(AssertionError):  # without lengths the padding shows
        assert_parity(_attend(hidden, torch.tensor([7, 7, 7], dtype=torch.int32))[1, :1], expected[1, :1], "attention")


POOLS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda x: x.mean(0),
    "mean_sqrt": lambda x: x.sum(0) / np.sqrt(len(x)),
    "cls": lambda x: x[0],
    "last": lambda x: x[-1],
    "max": lambda x: x.max(0),
}


@pytest.mark.parametrize("kind", sorted(POOLS))
def test_b129_b130_pooling_reads_the_real_tokens_alone(kind: str) -> None:
    hidden = torch.randn(3, 7, 12)
    for row, length in enumerate(LENGTHS.tolist()):
        hidden[row, length:] = float("nan")
    wanted = [POOLS[kind](hidden[row, :length].numpy()) for row, length in enumerate(LENGTHS.tolist())]
    assert_parity(pool(hidden, LENGTHS, kind), np.stack(wanted), "attention")
    assert torch.equal(pool(hidden, torch.zeros(3, dtype=torch.int32), kind), torch.zeros(3, 12))


@pytest.mark.parametrize(
    ("config", "length", "reason"),
    [
        (tiny_configs()["learned"], 8, "needs bidirectional attention or pooling; this config describes a decoder"),
        (tiny_encoder_configs()["encoder_with_head"], 8, "leave its vocabulary head out"),
        (tiny_encoder_configs()["encoder_bert"], 65, r"max_length \(65\) must lie in 1 .. max_positions \(64\)"),
    ],
)
def test_what_is_no_encoder_is_refused(config: TransformerConfig, length: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Encoder(Transformer(config), max_length=length)


def test_pooling_of_a_decoder_and_an_unknown_pooling_are_refused() -> None:
    with pytest.raises(ConfigError, match="what pools gives one vector a text and has no vocabulary head"):
        TransformerConfig.from_dict(tiny_configs()["learned"].to_dict() | {"pooling": {"type": "PoolingConfig"}})
    with pytest.raises(ConfigError, match=r"pooling kind must be one of mean, .*'median'"):
        PoolingConfig(kind="median")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sentence_folder(tmp_path_factory.mktemp("bert"), make_encoder("bert"))


def _relative(checkpoint: Checkpoint, model: Any, ids: list[int]) -> float:
    expected = reference_states(model, ids)
    ours = Transformer(checkpoint.config).eval()
    ours.load_state_dict(checkpoint.weights, strict=True)
    with torch.inference_mode():
        found = ours(torch.tensor([ids]))[0]
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_a_checkpoint_equals_transformers(model_type: str, tmp_path: Path) -> None:
    model = make_encoder(model_type)
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    ids = (2 + token_ids(40)).tolist()  # a padding id within a text moves roberta's positions in transformers
    limit = RELATIVE_TOLERANCES["checkpoint", "float32"]
    assert _relative(checkpoint, model, ids) <= limit
    swapped = checkpoint.weights["blocks.0.attention.query.weight"]
    swapped.copy_(swapped.reshape(3, 16, 48).flip(0).reshape(48, 48))
    assert _relative(checkpoint, model, ids) > limit


def test_a_recipe_states_pooling_normalisation_and_the_longest_text(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config.pooling == PoolingConfig(kind="mean", normalize=True)
    assert checkpoint.text_limit == 32
    assert "left out, of heads that are not used: pooler.dense.bias, pooler.dense.weight" in checkpoint.notes


def test_a_plain_folder_pools_the_mean_and_says_so(tmp_path: Path) -> None:
    make_encoder("bert").save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config.pooling == PoolingConfig()
    assert any("no modules.json: embeddings are the mean of the tokens, not norm" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("cls_token", "cls"), ("max_tokens", "max"), ("mean_sqrt_len_tokens", "mean_sqrt"), ("lasttoken", "last")],
)
def test_poolings_by_their_names(mode: str, kind: str, tmp_path: Path) -> None:
    save_sentence_folder(tmp_path, make_encoder("bert"), mode=mode, normalize=False, limit=None)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config.pooling == PoolingConfig(kind=kind)  # type: ignore[arg-type]
    assert checkpoint.text_limit is None


def _edit(folder: Path, name: str, **changes: Any) -> None:
    edit_json(folder / name, lambda values: values.update(changes))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("config.json", {"is_decoder": True}, "not supported for model_type bert .*is_decoder = True"),
        ("config.json", {"rope_theta": 1e4}, "rope_theta = 10000.0"),
        ("config.json", {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ("config.json", {"num_attention_heads": 5}, r"hidden_size \(48\) is no multiple of num_attention_heads \(5\)"),
        (
            "config.json",
            {"type_vocab_size": 3},
            r"embeddings.token_type_embeddings.weight is \[2, 48\], the config nee",
        ),
        ("config.json", {"layer_norm_eps": -1}, "norm epsilon must be a positive number, got -1"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling .*mean_tokens, .*cls_token is not supp"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "pooling 'attention' is not supported"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 7}, "pooling of 7 channels, the model has 48"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is true"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length must be a whole number of at least 1"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    name: str, changes: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            (tmp_path / path.relative_to(folder)).parent.mkdir(exist_ok=True)
            (tmp_path / path.relative_to(folder)).write_bytes(path.read_bytes())
    _edit(tmp_path, name, **changes)
    with pytest.raises(CheckpointError, match=reason):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        (["Transformer", "Pooling", "Dense"], "lists Transformer, Pooling, Dense; read are"),
        (["Pooling"], "lists Pooling; read are"),
    ],
)
def test_modules_with_weights_of_their_own_are_refused(modules: list[str], reason: str, tmp_path: Path) -> None:
    save_sentence_folder(tmp_path, make_encoder("bert"))
    entries = [{"path": "" if kind == "Transformer" else f"1_{kind}", "type": f"x.{kind}"} for kind in modules]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=reason):
        load_checkpoint(tmp_path)


def test_old_spellings_prefixes_and_heads_are_read_and_extra_tensors_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    old = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    old["cls.predictions.bias"] = torch.zeros(300)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(old, tmp_path / "model.safetensors")
    checkpoint = load_checkpoint(tmp_path)
    weights = load_checkpoint(folder).weights
    assert all(torch.equal(weights[name], value) for name, value in checkpoint.weights.items())
    save_file(old | {"bert.encoder.layer.0.adapter.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"not part of the model: bert.encoder.layer.0.adapter.weight"):
        load_checkpoint(tmp_path)


def test_modernbert_is_read_from_its_older_keys_too(tmp_path: Path) -> None:
    make_encoder("modernbert").save_pretrained(tmp_path)
    config = load_checkpoint(tmp_path).config
    assert [block.attention.window for block in config.blocks] == [None, 5, 5, None]
    assert [block.attention.rotary.theta for block in config.blocks if block.attention.rotary] == [16e4, 1e4, 1e4, 16e4]

    def older(values: dict[str, Any]) -> None:
        del values["layer_types"], values["rope_parameters"]
        values.update(global_attn_every_n_layers=3, global_rope_theta=160000.0, local_rope_theta=10000.0)

    edit_json(tmp_path / "config.json", older)
    assert load_checkpoint(tmp_path).config == config
    edit_json(tmp_path / "config.json", lambda values: values.pop("local_rope_theta"))
    with pytest.raises(CheckpointError, match="needed are rope_parameters, or global_rope_theta and local_rope_theta"):
        load_checkpoint(tmp_path)


def test_buckets_that_transformers_does_not_compute_are_refused(tmp_path: Path) -> None:
    make_encoder("mpnet").save_pretrained(tmp_path)
    _edit(tmp_path, "config.json", relative_attention_num_buckets=64)
    with pytest.raises(CheckpointError, match=r"relative_attention_num_buckets must be 32, .*got 64"):
        load_checkpoint(tmp_path)


def test_prompts_are_noted(folder: Path, tmp_path: Path) -> None:
    save_sentence_folder(tmp_path, make_encoder("bert"))
    _edit(tmp_path, "config_sentence_transformers.json", prompts={"query": "query: ", "document": ""})
    notes = load_checkpoint(tmp_path).notes
    assert "prompts are not added to texts, write them in front yourself: query 'query: '" in notes
