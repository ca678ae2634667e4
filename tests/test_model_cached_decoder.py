"""The cached decoder against whole texts for every kind of config: prefill, chunks, steps, ragged batches."""

import dataclasses

import pytest
import torch
from parity import assert_parity, assert_same_choice
from tiny_models import (
    MAX_POSITIONS,
    VOCAB,
    attention,
    block,
    decode_length,
    decoder,
    tiny_configs,
    tiny_encoder_configs,
    tiny_model,
    token_ids,
)
from torch import Tensor

from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import ConfigError
from graphport.model_def.transformer import Transformer

CONFIGS = tiny_configs()
ENCODERS = tiny_encoder_configs()
LENGTH = 13
NAN = float("nan")


def empty_caches(config: TransformerConfig, rows: int, *, capacity: int = 15, fill: float = NAN) -> list[Tensor]:
    """Caches in which everything is `fill`."""
    caches = []
    for layer in config.blocks:
        shape = (rows, layer.attention.num_kv_heads, capacity, layer.attention.head_dim)
        caches += [torch.full(shape, fill), torch.full(shape, fill)]
    return caches


def step(
    model: CachedDecoder, ids: Tensor, lengths: list[int], caches: list[Tensor], *, is_first: bool
) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, S, V] of ids [B, S], after which row b holds lengths[b] tokens, and the caches after the step."""
    rows, num_new = ids.shape
    seqlens_k = torch.tensor(lengths, dtype=torch.int32) - 1
    total = torch.tensor(num_new if is_first else max(lengths), dtype=torch.int32)
    with torch.no_grad():
        logits, *present = model(ids, seqlens_k, total, torch.arange(rows * num_new), *caches)
    return logits.unflatten(0, (rows, num_new)), present


def in_chunks(model: CachedDecoder, ids: Tensor, chunks: list[int]) -> Tensor:
    """Logits [B, S, V] of ids [B, S] taken chunk by chunk."""
    caches, logits, done = empty_caches(model.model.config, ids.shape[0]), [], 0
    for size in chunks:
        piece, caches = step(
            model, ids[:, done : done + size], [done + size] * ids.shape[0], caches, is_first=done == 0
        )
        logits.append(piece)
        done += size
    assert done == ids.shape[1]
    return torch.cat(logits, dim=1)


def whole(model: Transformer, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids)
    return logits


def cached(model: Transformer) -> CachedDecoder:
    return CachedDecoder(model, max_length=decode_length(model.config))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cached_decoder_equals_the_whole_text(name: str) -> None:
    model = tiny_model(CONFIGS[name])
    ids = token_ids(2, LENGTH)
    expected = whole(model, ids)
    for chunks in ([LENGTH], [5, 1, 7], [1] * LENGTH):
        logits = in_chunks(cached(model), ids, chunks)
        assert logits.dtype == torch.float32
        assert_parity(logits, expected, "cached", what=f"{name} in chunks of {chunks}")
        assert_same_choice(logits, expected, "cached")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_ragged_batch_equals_each_text_alone(name: str) -> None:
    model = tiny_model(CONFIGS[name])
    texts = [token_ids(length, seed=length) for length in (13, 9, 12)]
    expected = [whole(model, text[None])[0] for text in texts]
    prompts = [7, 3, 5]
    padded = [
        torch.nn.functional.pad(text[:prompt], (0, 7 - prompt)) for text, prompt in zip(texts, prompts, strict=True)
    ]
    runner = cached(model)
    logits, caches = step(runner, torch.stack(padded), prompts, empty_caches(model.config, 3), is_first=True)
    found = [[logits[row, :prompt]] for row, prompt in enumerate(prompts)]
    lengths = list(prompts)
    for _ in range(6):  # every row has six more tokens; rows stay at their own lengths
        lengths = [length + 1 for length in lengths]
        ids = torch.stack([text[length - 1 : length] for text, length in zip(texts, lengths, strict=True)])
        logits, caches = step(runner, ids, lengths, caches, is_first=False)
        for row in range(3):
            found[row].append(logits[row])
    for row, pieces in enumerate(found):
        assert_parity(torch.cat(pieces), expected[row][: lengths[row]], "cached", what=f"{name} row {row}")


@pytest.mark.parametrize("name", ["learned", "learned_offset", "everything"])
def test_b20_twenty_cached_greedy_steps_choose_what_recomputing_chooses(name: str) -> None:
    model = tiny_model(CONFIGS[name])
    runner, ids = cached(model), token_ids(1, 5)
    caches = empty_caches(model.config, 1, capacity=32)
    logits, caches = step(runner, ids, [5], caches, is_first=True)
    for length in range(5, 25):
        expected = whole(model, ids)[:, -1]
        assert_parity(logits[:, -1], expected, "cached", what=f"length {length}")
        ids = torch.cat((ids, expected.argmax(dim=-1, keepdim=True)), dim=1)
        logits, caches = step(runner, ids[:, -1:], [length + 1], caches, is_first=False)
    assert ids.unique().numel() > 3, "the text must not be one token over and over"


@pytest.mark.parametrize("name", ["learned", "learned_offset", "sinusoidal"])
def test_b20_chunks_of_three_tokens_over_a_past_have_their_positions(name: str) -> None:
    model, ids = tiny_model(CONFIGS[name]), token_ids(2, 12)
    assert_parity(in_chunks(cached(model), ids, [3, 3, 3, 3]), whole(model, ids), "cached")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", [1, 5])
def test_b22_a_first_prompt_of_one_or_five_tokens_needs_no_past(length: int, rows: int) -> None:
    model, ids = tiny_model(CONFIGS["grouped_query"]), token_ids(rows, length)
    caches = empty_caches(model.config, rows, capacity=length)  # no room to spare
    logits, _ = step(cached(model), ids, [length] * rows, caches, is_first=True)
    assert_parity(logits, whole(model, ids), "cached")


def test_b31_caches_have_the_stated_head_size_and_the_kv_heads() -> None:
    model = tiny_model(CONFIGS["own_head_dim"])  # hidden 64, 4 heads, 2 kv heads of 32
    _, caches = step(cached(model), token_ids(1, 5), [5], empty_caches(model.config, 1), is_first=True)
    assert [tuple(cache.shape) for cache in caches] == [(1, 2, 15, 32)] * 4


def test_b37_llama3_logits_agree_along_128_positions() -> None:
    config = dataclasses.replace(CONFIGS["rotary_llama3"], max_positions=128)
    model, ids = tiny_model(config), token_ids(1, 128)
    caches = empty_caches(config, 1, capacity=128)
    first, caches = step(cached(model), ids[:, :100], [100], caches, is_first=True)
    second, _ = step(cached(model), ids[:, 100:], [128], caches, is_first=False)
    expected = whole(model, ids)
    assert_parity(torch.cat((first, second), dim=1), expected, "cached")
    blocks = tuple(
        dataclasses.replace(
            layer, attention=attention(rotary=dataclasses.replace(layer.attention.rotary, scaling=None))
        )
        for layer in config.blocks
    )
    other = Transformer(dataclasses.replace(config, blocks=blocks))
    other.load_state_dict(model.state_dict())
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(whole(other, ids), expected, "cached", what="scaling dropped")


@pytest.mark.parametrize(
    "name", ["grouped_query", "window", "rotary_interleaved", "learned", "post_norm", "everything"]
)
def test_no_token_leaks_into_an_earlier_position(name: str) -> None:
    model, ids = tiny_model(CONFIGS[name]), token_ids(1, LENGTH)
    runner = cached(model)
    before, before_cached = whole(model, ids), in_chunks(runner, ids, [6, 7])
    for changed in (1, 7, LENGTH - 1):
        other = ids.clone()
        other[0, changed] = (other[0, changed] + 1) % VOCAB
        for old, new in ((before, whole(model, other)), (before_cached, in_chunks(runner, other, [6, 7]))):
            assert torch.equal(new[:, :changed], old[:, :changed])
            assert not torch.equal(new[:, changed], old[:, changed])


def test_only_the_rows_asked_for_have_logits_in_the_order_asked() -> None:
    model, ids = tiny_model(CONFIGS["everything"]), token_ids(2, 7)
    expected = whole(model, ids).flatten(0, 1)
    for rows in ([13, 0, 6, 6], [9], []):
        with torch.no_grad():
            logits, *_ = cached(model)(
                ids,
                torch.tensor([6, 6], dtype=torch.int32),
                torch.tensor(7, dtype=torch.int32),
                torch.tensor(rows, dtype=torch.int64),
                *empty_caches(model.config, 2),
            )
        assert logits.shape == (len(rows), VOCAB)
        if rows:
            assert_parity(logits, expected[rows], "cached")


@pytest.mark.parametrize("name", ["grouped_query", "rotary_partial_0.25", "learned"])
def test_a_cached_position_off_by_one_is_rejected(name: str) -> None:
    model, ids = tiny_model(CONFIGS[name]), token_ids(1, LENGTH)
    runner, expected = cached(model), whole(model, ids)
    logits, caches = step(runner, ids[:, :8], [8], empty_caches(model.config, 1), is_first=True)
    with torch.no_grad():  # from here every new token is taken for the one after
        for table in [buffer for _, buffer in runner.named_buffers()] + [p.weight for p in [model.position] if p]:
            table.copy_(table.roll(-1, dims=0))
    assert_parity(logits, expected[:, :8], "cached")
    logits, _ = step(runner, ids[:, 8:], [LENGTH], caches, is_first=False)
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(logits, expected[:, 8:], "cached")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_in_half_precision_stays_in_it(name: str) -> None:
    model = tiny_model(CONFIGS[name]).to(torch.bfloat16)
    ids = token_ids(2, 5)
    assert whole(model, ids).dtype == torch.bfloat16
    caches = [cache.to(torch.bfloat16) for cache in empty_caches(model.config, 2)]
    logits, caches = step(cached(model), ids, [5, 5], caches, is_first=True)
    assert logits.dtype == torch.float32
    assert {cache.dtype for cache in caches} == {torch.bfloat16}
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    ("config", "max_length", "message"),
    [
        (ENCODERS["encoder_with_head"], 8, "a cached decoder needs causal attention and a head; .* an encoder"),
        (decoder(block(), head="none"), 8, "a cached decoder needs causal attention and a head"),
        (CONFIGS["grouped_query"], 65, r"max_length \(65\) must lie in 1 \.\. max_positions \(64\); .* --context"),
        (CONFIGS["grouped_query"], 0, r"max_length \(0\) must lie in 1 \.\. max_positions \(64\)"),
    ],
)
def test_a_decoder_that_cannot_be_cached_is_refused(config: TransformerConfig, max_length: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CachedDecoder(Transformer(config), max_length=max_length)


def test_the_longest_text_fills_the_cache_to_the_last_position() -> None:
    model, ids = tiny_model(CONFIGS["learned"]), token_ids(1, MAX_POSITIONS)
    caches = empty_caches(model.config, 1, capacity=MAX_POSITIONS)
    _, caches = step(cached(model), ids[:, :-1], [MAX_POSITIONS - 1], caches, is_first=True)
    logits, _ = step(cached(model), ids[:, -1:], [MAX_POSITIONS], caches, is_first=False)
    assert_parity(logits, whole(model, ids)[:, -1:], "cached")
