"""Encoder-decoder families: config and weights read, eager logits equal to transformers', the cached path to both.

Every shape of `tiny_encoder_decoders.py` at the cheap tier; nothing is exported here.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import RELATIVE_TOLERANCES, assert_parity
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json
from tiny_encoder_decoders import (
    END,
    POSITIONS,
    SHAPES,
    START,
    example_sources,
    make_encoder_decoder,
    source_ids,
    source_input,
    teacher_logits,
)

from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from graphport.model_def.config import ConfigError, TransformerConfig
from graphport.model_def.position_config import SinusoidalPosition
from graphport.model_def.positions import causal_buckets, sinusoidal_table
from graphport.model_def.source_encoder import SourceEncoder
from graphport.model_def.transformer import Transformer

IDS = [START, *source_ids(20, seed=1)]

Read = tuple[Any, Checkpoint, Path]


@pytest.fixture(scope="module", params=tuple(SHAPES))
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Checkpoint, Path]:
    model = make_encoder_decoder(request.param)
    folder = tmp_path_factory.mktemp("pair")
    model.save_pretrained(folder)
    return model, load_checkpoint(folder), folder


def loaded(checkpoint: Checkpoint) -> Transformer:
    model = Transformer(checkpoint.config).eval()
    model.load_state_dict(checkpoint.weights, strict=True)
    return model


def sources_of(reference: Any) -> list[Any]:
    """Two sources, of different lengths where they have lengths."""
    return example_sources(reference.config.model_type, (11, 30))


def encoded(model: Transformer, source: Any) -> Any:
    (found,) = source_input(source).values()
    return model.encode(found)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@torch.inference_mode()
def test_eager_logits_equal_transformers(read: Read) -> None:
    reference, checkpoint, _ = read
    source, other_source = sources_of(reference)
    model, expected = loaded(checkpoint), teacher_logits(reference, source, IDS)
    found = model(torch.tensor([IDS]), source=encoded(model, source))[0]
    assert relative(found, expected) < RELATIVE_TOLERANCES["checkpoint", "float32"]
    other = model(torch.tensor([IDS]), source=encoded(model, other_source))[0]
    assert relative(other, expected) > 100 * RELATIVE_TOLERANCES["checkpoint", "float32"]


@torch.inference_mode()
def test_b125_padding_and_neighbours_of_a_source_change_nothing(read: Read) -> None:
    reference, checkpoint, _ = read
    model, (source, other) = loaded(checkpoint), sources_of(reference)
    if reference.config.model_type == "whisper":
        read_source = model.encode(torch.from_numpy(np.stack([source, other])))
    else:
        padded, lengths = torch.full((2, 30), 5), torch.tensor([len(source), 30])
        padded[0, : len(source)] = torch.tensor(source)
        read_source = model.encode(padded, lengths)
    found = model(torch.tensor([IDS, IDS]), source=read_source)[0]
    assert relative(found, teacher_logits(reference, source, IDS)) < RELATIVE_TOLERANCES["checkpoint", "float32"]


@torch.inference_mode()
def test_b126_decoding_with_a_cache_equals_recomputing(read: Read) -> None:
    reference, checkpoint, _ = read
    model, config, capacity = loaded(checkpoint), checkpoint.config, 32
    decoder, encoder = CachedDecoder(model, max_length=capacity), SourceEncoder(model)
    given = sources_of(reference)[0]
    if reference.config.model_type == "whisper":
        pairs, length = encoder(torch.from_numpy(given)[None]), POSITIONS
    else:
        length = len(given)
        pairs = encoder(torch.tensor([[*given, 7, 7]]), torch.tensor([length], dtype=torch.int32))
    source = [torch.tensor([length], dtype=torch.int32), *pairs]
    past = [
        torch.full((1, block.attention.num_kv_heads, capacity, block.attention.head_dim), torch.nan)
        for block in config.blocks
        for _ in range(2)
    ]
    rows = []
    for begin, end in ((0, 3), *((i, i + 1) for i in range(3, len(IDS)))):  # three at once, then one by one
        logits, *past = decoder(
            torch.tensor([IDS[begin:end]]),
            torch.tensor([end - 1], dtype=torch.int32),
            torch.tensor(end, dtype=torch.int32),
            torch.arange(end - begin),
            *past,
            *source,
        )
        rows.append(logits)
    assert_parity(torch.cat(rows), teacher_logits(reference, given, IDS), "cached")


def test_the_configuration_survives_its_json(read: Read) -> None:
    config = read[1].config
    assert TransformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_generation_config_says_how_a_text_begins_and_ends(read: Read) -> None:
    forced = read[1].generation.forced
    assert forced is not None
    assert forced.start == (START,)
    assert forced.last == (None if read[0].config.model_type in ("t5", "whisper") else END)


def test_an_unknown_key_and_a_block_of_another_order_are_refused_by_name(tmp_path: Path) -> None:
    make_encoder_decoder("bart").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda values: values.update(normalize_before=True, moe_layers=2))
    with pytest.raises(CheckpointError, match=r"model_type bart .*: moe_layers = 2; normalize_before = True|normalize"):
        load_checkpoint(tmp_path)


def test_heads_that_do_not_divide_the_width_are_refused(tmp_path: Path) -> None:
    make_encoder_decoder("marian").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda values: values.update(decoder_attention_heads=5))
    with pytest.raises(CheckpointError, match=r"d_model \(24\) is no multiple of decoder_attention_heads \(5\)"):
        load_checkpoint(tmp_path)


def test_a_trained_head_beside_a_tied_flag_is_refused(tmp_path: Path) -> None:
    model = make_encoder_decoder("bart")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(weights["model.shared.weight"].shape)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and model\.shared\.weight are different tensors"):
        load_checkpoint(tmp_path)


def test_a_missing_start_id_is_refused(tmp_path: Path) -> None:
    make_encoder_decoder("bart").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()

    def drop(values: dict[str, Any]) -> None:
        values.pop("decoder_start_token_id")
        values.pop("bos_token_id")

    edit_json(tmp_path / "config.json", drop)
    with pytest.raises(CheckpointError, match="decoder_start_token_id is missing"):
        load_checkpoint(tmp_path)


def test_a_forced_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    make_encoder_decoder("bart").save_pretrained(tmp_path)
    edit_json(tmp_path / "generation_config.json", lambda values: values.update(forced_bos_token_id=500))
    with pytest.raises(CheckpointError, match="id 500, beyond a vocabulary of 67"):
        load_checkpoint(tmp_path)


def test_a_stored_table_of_sines_is_checked(tmp_path: Path) -> None:
    model = make_encoder_decoder("marian")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.encoder.embed_positions.weight"
    weights[name] = sinusoidal_table(72, 24, halves=True)
    save_file(weights, tmp_path / "model.safetensors")
    assert f"ignored tensors: {name}" in load_checkpoint(tmp_path).notes
    weights[name] = sinusoidal_table(72, 24)  # alternating
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not the table of sines and cosines"):
        load_checkpoint(tmp_path)


def test_causal_buckets_equal_transformers(read: Read) -> None:
    bias = read[1].config.relative_bias
    if bias is None:
        assert read[0].config.model_type != "t5"
        return
    attention = read[0].decoder.block[0].layer[0].SelfAttention
    expected = attention._relative_position_bucket(
        -torch.arange(200), bidirectional=False, num_buckets=bias.num_buckets, max_distance=bias.max_distance
    )
    assert torch.equal(causal_buckets(bias, 200), expected)


@torch.inference_mode()
def test_the_original_transformer_equals_that_of_torch() -> None:
    """Post-norm, ReLU, alternating sines and cosines, embeddings times the root of the width (Vaswani et al. 2017)."""
    own = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=6, causal=False, qkv_bias=True, output_bias=True)
    norm = NormConfig(kind="layer", epsilon=1e-5, bias=True)
    block = BlockConfig(
        attention=own,
        feed_forward=FeedForwardConfig(width=40, activation="relu", gated=False, bias=True),
        norm=norm,
        norm_order="post",
    )
    encoder = TransformerConfig(
        vocab_size=61,
        hidden_size=24,
        max_positions=32,
        blocks=(block,) * 2,
        position=SinusoidalPosition(max_positions=32),
        embedding_scale=24**0.5,
        final_norm=norm,
        head="none",
    )
    reader = dataclasses.replace(block, attention=dataclasses.replace(own, causal=True), cross_attention=own)
    config = dataclasses.replace(encoder, blocks=(reader,) * 2, encoder=encoder, head="tied")
    torch.manual_seed(0)
    model = Transformer(config).eval()
    reference = torch.nn.Transformer(24, 4, 2, 2, 40, dropout=0.0, batch_first=True).eval()
    assert model.encoder is not None
    pairs = [(model.encoder, reference.encoder, False), (model, reference.decoder, True)]
    for ours, theirs, reads in pairs:
        theirs.norm.load_state_dict(ours.final_norm.state_dict())
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            norms = [a.attention_norm, *([a.cross_attention_norm] if reads else []), a.feed_forward_norm]
            for number, found in enumerate(norms, 1):
                getattr(b, f"norm{number}").load_state_dict(found.state_dict())
            for name, attention in (("self_attn", a.attention), ("multihead_attn", a.cross_attention)):
                if attention is None:
                    continue
                parts = (attention.query, attention.key, attention.value)
                getattr(b, name).in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
                getattr(b, name).in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
                getattr(b, name).out_proj.load_state_dict(attention.output.state_dict())
            b.linear1.load_state_dict(a.feed_forward.up.state_dict())
            b.linear2.load_state_dict(a.feed_forward.down.state_dict())

    def embedded(stack: Transformer, ids: list[int]) -> torch.Tensor:
        return stack.embedding(torch.tensor([ids])) * 24**0.5 + sinusoidal_table(len(ids), 24)

    source, mask = source_ids(11), torch.nn.Transformer.generate_square_subsequent_mask(len(IDS))
    states = reference(embedded(model.encoder, source), embedded(model, IDS), tgt_mask=mask)[0]
    expected = states @ model.embedding.weight.T
    found = model(torch.tensor([IDS]), source=model.encode(torch.tensor([source])))[0]
    assert relative(found, expected) < RELATIVE_TOLERANCES["checkpoint", "float32"]


def test_cross_attention_without_an_encoder_is_no_config(read: Read) -> None:
    fields = read[1].config.to_dict()
    with pytest.raises(ConfigError, match="blocks have cross_attention"):
        TransformerConfig.from_dict({**fields, "encoder": None})
    blocks = [{**block, "cross_attention": {**block["cross_attention"], "causal": True}} for block in fields["blocks"]]
    with pytest.raises(ConfigError, match="cross_attention sees a whole source"):
        TransformerConfig.from_dict({**fields, "blocks": blocks})
    assert isinstance(read[1].config.blocks[0].cross_attention, AttentionConfig)


def test_keys_that_are_read_for_generation_are_not_called_ignored(tmp_path: Path) -> None:
    make_encoder_decoder("marian").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.update(decoder_start_token_id=3, forced_eos_token_id=2))
    (note,) = (note for note in load_checkpoint(tmp_path).notes if note.startswith("ignored config keys"))
    assert "architectures" in note
    assert "_token_id" not in note
