"""Tiny random encoder-decoders of transformers, one shape a family and those that a config.json turns it into.

In: a name. Out: models whose attention is far from uniform and whose biases are not zero. Seeded, nothing is fetched.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 67
PAD, END, START = 1, 2, 3
LANGUAGES = {"en_XX": 64, "de_DE": 65, "fr_XX": 66}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 72,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": 0,
    "decoder_start_token_id": START,
    "forced_eos_token_id": END,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "d_kv": 16,  # unlike d_model / num_heads
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": START,
    "pad_token_id": PAD,
    "eos_token_id": END,
}

SHAPES: Mapping[str, tuple[type, type, dict[str, Any]]] = {
    "bart": (BartConfig, BartForConditionalGeneration, _SIZES),
    "mbart": (MBartConfig, MBartForConditionalGeneration, _SIZES),
    "marian": (MarianConfig, MarianMTModel, {**_SIZES, "activation_function": "swish"}),
    "t5": (T5Config, T5ForConditionalGeneration, _T5),
    "marian, two vocabularies": (
        MarianConfig,
        MarianMTModel,
        {**_SIZES, "decoder_vocab_size": 59, "share_encoder_decoder_embeddings": False, "scale_embedding": True},
    ),
    "t5, gated": (
        T5Config,
        T5ForConditionalGeneration,
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_decoder_layers": 3},
    ),
}
# one shape a family, taken through every stage
FAMILIES = ("bart", "mbart", "marian", "t5")  # in the order of the table


def make_encoder_decoder(name: str, seed: int = 0) -> Any:
    config_class, model_class, sizes = SHAPES[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**sizes)).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:  # the tables of sines are not drawn
            parameter.data = _drawn(parameter_name, parameter)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias = torch.randn_like(model.final_logits_bias) * 0.1
    return model


def _drawn(name: str, parameter: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(parameter)
    if parameter.dim() == 1:
        return 0.1 * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    if "relative_attention_bias" in name:
        return 5.0 * noise
    sharp = ("q_proj", "k_proj")  # T5 divides no scores: its attention is sharp as it is
    if name.endswith(("shared.weight", "embed_tokens.weight")):
        return noise * 0.15  # else a tied head repeats what it has just read, whatever the source
    if "embed_positions" in name:
        return noise
    quiet = ("out_proj", "fc2")  # what is added to the stream must not drown where a token stands
    scale = 2.0 if any(part in name for part in sharp) else 0.5 if any(part in name for part in quiet) else 1.5
    return noise * scale / math.sqrt(parameter.shape[-1])


def teacher_logits(model: Any, source: list[int], ids: list[int]) -> torch.Tensor:
    """Logits [S, V] of transformers over the decoder's `ids` at once."""
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids]), use_cache=False)
    logits: torch.Tensor = found.logits[0]
    return logits


def source_ids(length: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(100 * seed + length)
    ids: list[int] = torch.randint(4, 59, (length,), generator=generator).tolist()
    return ids


def language_tokenizer() -> Tokenizer:
    """A tokenizer of words that ends a text with its end id and English's code, as mBART's does."""
    vocab = {f"word{index}": index for index in range(4, 60)} | {"<pad>": PAD, "</s>": END, "<s>": 0, "<start>": START}
    tokenizer = Tokenizer(models.WordLevel({**vocab, "<unk>": 60}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for index in range(61, 64):
        tokenizer.add_tokens([f"filler{index}"])
    tokenizer.add_special_tokens([AddedToken(code) for code in LANGUAGES])
    assert {code: tokenizer.token_to_id(code) for code in LANGUAGES} == LANGUAGES
    tokenizer.add_special_tokens([AddedToken(text) for text in ("<pad>", "</s>", "<s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s> en_XX", special_tokens=[("</s>", END), ("en_XX", LANGUAGES["en_XX"])]
    )
    return tokenizer
