"""Tiny checkpoints for tests: random transformers models, their folders, and GGUF files made with gguf-py.

In: a model type and changes to its config. Out: models whose attention is far from uniform, folders, .gguf files.
Nothing is fetched; everything is seeded.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from tiny_blocks import random_matrix
from tokenizers import Tokenizer
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from graphport.model_def.checkpoint import Checkpoint
from graphport.model_def.config import TransformerConfig
from graphport.model_def.transformer import Transformer

Edit = Callable[[gguf.GGUFWriter], None]

CLASSES = {
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

# transformers' model types that llama.cpp calls otherwise
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "phi": "phi2",
    "gpt_neox": "gptneox",
    "cohere": "command-r",
}

# query heads, kv heads, head size and hidden / heads are all different
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# a window in six of seven layers; scores scaled by the head size, as llama.cpp takes them
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 16,
    "sliding_window": 5,
    "pad_token_id": 0,
}


# one scaling a rope_type; 16 is where each of them changes
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0],
    "original_max_position_embeddings": 16,
}


def make_model(model_type: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random fp32 model in eval mode: sharp attention, norms away from 1, biases not zero."""
    config_class, model_class = CLASSES[model_type]
    config = config_class(**(SIZES | changes))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                sharpness = 2.5 if "q_proj" in name or "k_proj" in name else 1.0
                parameter.copy_(noise * sharpness * parameter.shape[-1] ** -0.5)
    return model


def save_folder(folder: Path, model: Any, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    change(values)
    path.write_text(json.dumps(values))


def token_ids(length: int, *, vocab_size: int = 61, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))


def our_logits(config: TransformerConfig, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    model = Transformer(config).eval()
    model.load_state_dict(weights, strict=True)
    with torch.no_grad():
        return model(ids)


def relative_difference(checkpoint: Checkpoint, model: Any, ids: torch.Tensor) -> float:
    """Largest logit difference to the transformers model, over its largest logit."""
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    actual = our_logits(checkpoint.config, checkpoint.weights, ids)
    return float((actual - expected).abs().max() / expected.abs().max())


def converter_rows(num_heads: int, head_dim: int) -> np.ndarray:
    """The row order that llama.cpp's convert_hf_to_gguf.py gives q and k of a llama."""
    rows = np.arange(num_heads * head_dim)
    return rows.reshape(num_heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: gguf.GGMLQuantizationType | Callable[[str], gguf.GGMLQuantizationType] = gguf.GGMLQuantizationType.F32,
    extra: dict[str, np.ndarray] | None = None,
    edit: Edit = lambda _writer: None,
) -> Path:
    """Write `model` as llama.cpp's converter does: gguf's names, q and k of llamas permuted, 1 + the norms of gemmas.

    Matrices become `kind` (or what it says for a name of `model`'s), vectors stay F32; `model`'s own weights are set to
    what the blocks decode to, so that its logits are the reference. Types that gguf-py does not quantise to get random
    blocks. `extra` adds float32 tensors, `edit` adds metadata.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type.removesuffix("_text"))
    member = next(member for member, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(member, config.num_hidden_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = {"q_proj": config.num_attention_heads, "k_proj": _first(config, "num_key_value_heads")}
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, config, head_dim)
    edit(writer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = parameter.numpy().copy()
            rows = np.arange(len(values))
            module = name.split(".")[-2]
            if architecture in ("llama", "granite", "smollm3") and module in heads:
                rows = converter_rows(heads[module], head_dim)
            tensor_kind = gguf.GGMLQuantizationType.F32
            if values.ndim >= 2:
                tensor_kind = kind(name) if callable(kind) else kind
            added = np.float32(architecture.startswith("gemma") and "norm" in name)
            blocks = _blocks(values[rows] + added, tensor_kind)
            decoded = dequantize(blocks, tensor_kind).astype(np.float32).reshape(values.shape) - added
            parameter[torch.from_numpy(rows)] = torch.from_numpy(decoded)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), blocks, raw_dtype=tensor_kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.astype(np.float32))
    finish(writer)
    return path


def _blocks(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    try:
        return quantize(values, kind)
    except NotImplementedError:
        return random_matrix(kind, *values.shape, seed=int(1e6 * abs(values[0, 0])))


def _add_sizes(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(_first(config, "intermediate_size", "ffn_hidden_size", "n_inner"))
    writer.add_head_count(config.num_attention_heads)
    kv_heads = _first(config, "num_kv_heads", "num_key_value_heads")
    if kv_heads is not None:
        writer.add_head_count_kv(kv_heads)
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(_first(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"))
    if hasattr(config, "rope_parameters"):
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    is_latent = hasattr(config, "kv_lora_rank")  # whose heads have several sizes
    if head_dim * config.num_attention_heads != config.hidden_size and not is_latent:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def _first(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Write a byte-level BPE tokenizer as llama.cpp's converter does."""
    size = tokenizer.get_vocab_size()
    added = tokenizer.get_added_tokens_decoder()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokenizer.id_to_token(number) for number in range(size)])
    writer.add_token_types([1 if n not in added else 3 if added[n].special else 4 for n in range(size)])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.token_to_id("</s>"))


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_divisors(rotary: dict[str, Any], head_dim: int) -> np.ndarray:
    """The `rope_freqs` tensor that llama.cpp's converter makes from Llama 3.1's scaling."""
    factor, low, high = rotary["factor"], rotary["low_freq_factor"], rotary["high_freq_factor"]
    original = rotary["original_max_position_embeddings"]
    divisors = []
    for dim in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rotary["rope_theta"] ** (dim / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors)
