"""What benchmarks/gpu.py times: graphport, transformers eager and torch.compile, on random Llama-like models.

In: a size, a device. Out: functions from (prompt length, batch) to tokens a second. It measures nothing by itself.
"""

import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from graphport.export import export
from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import RotaryPosition
from graphport.model_def.transformer import Transformer
from graphport.runtime import LanguageModel, load_language_model
from graphport.runtime.benchmark import measure_speed
from graphport.runtime.device import DeviceWish

NEW_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A Llama-like shape; `block` is the side of the matrices whose product is timed."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    block: int


SIZES = {
    "1b": Size(
        name="1b", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, width=8192, vocab=128256, block=8192
    ),
    "tiny": Size(name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, width=96, vocab=199, block=256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens a second of one system for one prompt length and batch."""

    prefill: float
    decode: float


System = Callable[[int, int], Rates]  # prompt length, batch


def transformer_config(size: Size, max_positions: int) -> TransformerConfig:
    """The graphport config of a size."""
    norm = NormConfig(epsilon=1e-5)
    attention = AttentionConfig(
        num_heads=size.heads, num_kv_heads=size.kv_heads, head_dim=size.head_dim, rotary=RotaryPosition(theta=5e5)
    )
    block = BlockConfig(attention=attention, feed_forward=FeedForwardConfig(width=size.width), norm=norm)
    return TransformerConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        max_positions=max_positions,
        blocks=(block,) * size.layers,
        final_norm=norm,
    )


def open_graphport(size: Size, device: DeviceWish, *, folder: Path, max_batch: int, longest: int) -> LanguageModel:
    """Export a random model of `size` below `folder`, unless it is there, and open it."""
    bundle = folder / f"llama-{size.name}-{device}-{longest}"
    if not bundle.exists():
        torch.manual_seed(0)
        target, precision = ("cuda", "fp16") if device == "cuda" else ("cpu", "fp32")
        print(f"exporting {bundle}", file=sys.stderr)
        export(Transformer(transformer_config(size, longest)), bundle, target=target, precision=precision, verify=False)
    return load_language_model(bundle, device=device, max_batch=max_batch, max_length=longest, prefill_chunk=longest)


def open_systems(lm: LanguageModel, size: Size, device: torch.device, *, longest: int) -> dict[str, System]:
    """Every system that runs on `device`, by name; torch.compile on CUDA alone."""

    def graphport(length: int, batch: int) -> Rates:
        row = measure_speed(lm, prompt_length=length, batch=batch, new_tokens=NEW_TOKENS, repeats=1)
        return Rates(prefill=row.prefill_tokens_per_s, decode=row.decode_tokens_per_s)

    config = transformers.LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    loaded: Any = transformers.LlamaForCausalLM(config)  # its methods are decorated without types
    model = loaded.to(device, dtype).eval()
    systems: dict[str, System] = {
        "graphport": graphport,
        "eager": lambda length, batch: _transformers_rates(model, model.forward, length, batch, is_static=False),
    }
    if device.type == "cuda":
        step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        systems["torch.compile"] = lambda length, batch: _transformers_rates(model, step, length, batch, is_static=True)
    return systems


@torch.inference_mode()
def _transformers_rates(
    model: transformers.LlamaForCausalLM,
    step: Callable[..., Any],
    length: int,
    batch: int,
    *,
    is_static: bool,
) -> Rates:
    """Prefill runs uncompiled, as it has one shape a prompt length; `step` takes the single tokens."""
    device = model.device
    cache = (
        transformers.StaticCache(config=model.config, max_cache_len=length + NEW_TOKENS)
        if is_static
        else transformers.DynamicCache(config=model.config)
    )
    # transformers 5.24 renames past_key_values to cache
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.randint(model.config.vocab_size, (batch, length), device=device)
    wait(device)
    begin = time.perf_counter()
    token = model.forward(ids, **{name: cache}, logits_to_keep=1).logits[:, -1:].argmax(-1)
    wait(device)
    first = time.perf_counter()
    for index in range(NEW_TOKENS - 1):
        positions = torch.full((batch, 1), length + index, device=device)
        token = step(token, position_ids=positions, **{name: cache}).logits[:, -1:].argmax(-1).clone()
    wait(device)
    end = time.perf_counter()
    return Rates(prefill=batch * length / (first - begin), decode=batch * (NEW_TOKENS - 1) / (end - first))


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
