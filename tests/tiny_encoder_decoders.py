"""Tiny random encoder-decoders of transformers, one shape a family and those that a config.json turns it into.

In: a name. Out: models whose attention is far from uniform and whose biases are not zero. Seeded, nothing is fetched.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    WhisperConfig,
    WhisperForConditionalGeneration,
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
# a second of sound, and ids for all that stands before a text
MEL_BINS, POSITIONS = 80, 50
SPOKEN = {"en": 61, "de": 62, "fr": 63}
TASKS = {"translate": 64, "transcribe": 65}
NO_TIMESTAMPS = 66
_WHISPER: dict[str, Any] = {
    **{key: value for key, value in _SIZES.items() if key not in ("max_position_embeddings", "forced_eos_token_id")},
    "vocab_size": 80,  # 13 marks of time
    "num_mel_bins": MEL_BINS,
    "max_source_positions": POSITIONS,
    "max_target_positions": 64,
    "begin_suppress_tokens": [END, 7],
}
SPEECH: dict[str, Any] = {
    "is_multilingual": True,
    "lang_to_id": {f"<|{code}|>": id_ for code, id_ in SPOKEN.items()},
    "task_to_id": TASKS,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "max_initial_timestamp_index": 5,
    "return_timestamps": False,
    "suppress_tokens": [9, 11, START, 61, 62, 63, 64, 65],
    "begin_suppress_tokens": [END, 7],
    "max_length": 64,
}

SHAPES: Mapping[str, tuple[type, type, dict[str, Any]]] = {
    "bart": (BartConfig, BartForConditionalGeneration, _SIZES),
    "mbart": (MBartConfig, MBartForConditionalGeneration, _SIZES),
    "marian": (MarianConfig, MarianMTModel, {**_SIZES, "activation_function": "swish"}),
    "t5": (T5Config, T5ForConditionalGeneration, _T5),
    "whisper": (WhisperConfig, WhisperForConditionalGeneration, _WHISPER),
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
FAMILIES = ("bart", "mbart", "marian", "t5", "whisper")  # in the order of the table


def make_encoder_decoder(name: str, seed: int = 0) -> Any:
    config_class, model_class, sizes = SHAPES[name]
    torch.manual_seed(seed)
    model = model_class(config_class(**sizes)).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:  # the tables of sines are not drawn
            parameter.data = _drawn(parameter_name, parameter)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias = torch.randn_like(model.final_logits_bias) * 0.1
    if name == "whisper":
        for key, value in SPEECH.items():
            setattr(model.generation_config, key, value)
    return model


def _drawn(name: str, parameter: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(parameter)
    if parameter.dim() == 1:
        return 0.1 * noise + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    if "relative_attention_bias" in name:
        return 5.0 * noise
    if parameter.dim() == 3:  # a convolution
        return noise * 1.5 / math.sqrt(parameter.shape[1] * 3)
    sharp = ("q_proj", "k_proj")  # T5 divides no scores: its attention is sharp as it is
    if name.endswith(("shared.weight", "embed_tokens.weight")):
        return noise * 0.15  # else a tied head repeats what it has just read, whatever the source
    if "embed_positions" in name:
        return noise
    quiet = ("out_proj", "fc2")  # what is added to the stream must not drown where a token stands
    scale = 2.0 if any(part in name for part in sharp) else 0.5 if any(part in name for part in quiet) else 1.5
    return noise * scale / math.sqrt(parameter.shape[-1])


def teacher_logits(model: Any, source: Any, ids: list[int]) -> torch.Tensor:
    """Logits [S, V] of transformers over the decoder's `ids` at once; `source` are ids, or features [M, F]."""
    with torch.inference_mode():
        found = model(**source_input(source), decoder_input_ids=torch.tensor([ids]), use_cache=False)
    logits: torch.Tensor = found.logits[0]
    return logits


def source_input(source: Any) -> dict[str, torch.Tensor]:
    """A source as transformers takes it."""
    if isinstance(source, np.ndarray):
        return {"input_features": torch.from_numpy(source)[None]}
    return {"input_ids": torch.tensor([source])}


def example_sources(name: str, lengths: tuple[int, ...]) -> list[Any]:
    """Ids of these lengths, or as many features [M, F] for a model that hears."""
    if not name.startswith("whisper"):
        return [source_ids(length) for length in lengths]
    return [features(seed) for seed in range(len(lengths))]


def features(seed: int) -> NDArray[np.float32]:
    """Random log-mel features [M, F]."""
    return np.random.default_rng(seed).uniform(-1, 1, (MEL_BINS, 2 * POSITIONS)).astype(np.float32)


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
