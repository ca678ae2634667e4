"""Every decoder family that is read, as tiny random models of transformers, in each shape that differs.

In: a name of `DECODERS`. Out: models, fp32 in eval mode, whose attention is far from uniform. Seeded; nothing is
fetched or compared.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from tiny_decoder_values import (
    BIASED,
    DEEPSEEK_DECODERS,
    EXPERTS,
    FALCON,
    GPT2,
    LLAMA,
    LONGROPE,
    OPT,
    ORIGINAL,
    OWN_HEADS,
    POSITIONS,
    QWEN_MOE,
    VOCAB,
    WINDOW,
    WITHOUT_HEAD_DIM,
    YARN,
    Decoder,
    theta,
)
from transformers import AutoConfig, AutoModelForCausalLM

_SHARPNESS = 2.0  # times the usual weights, for q and for k

DECODERS: Mapping[str, Decoder] = {
    "llama": Decoder(model_type="llama", values={**LLAMA, **BIASED, **theta(100.0)}),
    "mistral": Decoder(model_type="mistral", values={**LLAMA, **theta(100.0), "sliding_window": WINDOW}, window=WINDOW),
    "qwen2": Decoder(model_type="qwen2", values={**LLAMA, **theta(100.0), "hidden_size": 96}),
    "qwen3": Decoder(model_type="qwen3", values={**LLAMA, **theta(100.0), "attention_bias": True}),
    "mixtral": Decoder(
        model_type="mixtral",
        values={**LLAMA, **theta(100.0), "num_local_experts": 5, "sliding_window": WINDOW},
        gated=0,
        experts=2,
        window=WINDOW,
    ),
    "qwen2_moe": Decoder(
        model_type="qwen2_moe", values={**LLAMA, **theta(100.0), **QWEN_MOE, "mlp_only_layers": []}, experts=2
    ),
    "qwen2_moe with a dense layer": Decoder(
        model_type="qwen2_moe",
        values={**LLAMA, **theta(100.0), **QWEN_MOE, "mlp_only_layers": [0], "norm_topk_prob": True},
        experts=1,
    ),
    "qwen3_moe": Decoder(
        model_type="qwen3_moe",
        values={
            **LLAMA,
            **theta(100.0),
            **EXPERTS,
            "attention_bias": True,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
        gated=1,
        experts=1,
    ),
    **DEEPSEEK_DECODERS,
    "gpt_oss": Decoder(
        model_type="gpt_oss",
        values={
            **LLAMA,
            "sliding_window": WINDOW,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "swiglu_limit": 1.5,
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 8.0},
        },
        gated=0,
        experts=2,
        window=WINDOW,
    ),
    "smollm3": Decoder(
        model_type="smollm3",
        values={**LLAMA, **BIASED, **theta(100.0), "no_rope_layers": [1, 0], "tie_word_embeddings": False},
    ),
    "granite": Decoder(
        model_type="granite",
        values={
            **LLAMA,
            **BIASED,
            **theta(100.0),
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.5,
        },
    ),
    "olmo2": Decoder(model_type="olmo2", values={**LLAMA, **theta(100.0), "attention_bias": True}, residual_norm=1),
    "olmo3": Decoder(
        model_type="olmo3",
        values={
            **LLAMA,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 100.0,
                    "factor": 3.0,
                    "original_max_position_embeddings": ORIGINAL,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        residual_norm=1,
        window=WINDOW,
    ),
    "gemma": Decoder(model_type="gemma", values={**LLAMA, **theta(100.0), "num_key_value_heads": 1}),
    "gemma2": Decoder(
        model_type="gemma2",
        values={
            **LLAMA,
            **theta(100.0),
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 11,
            "attn_logit_softcapping": 6.0,
            "final_logit_softcapping": 5.0,
        },
        window=WINDOW,
    ),
    "gemma3_text": Decoder(
        model_type="gemma3_text",
        values={
            **LLAMA,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 11,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        window=WINDOW,
    ),
    "phi3": Decoder(
        model_type="phi3",
        values={**WITHOUT_HEAD_DIM, **theta(100.0), "sliding_window": WINDOW},
        window=WINDOW,
    ),
    "phi3 longrope": Decoder(
        model_type="phi3",
        values={**WITHOUT_HEAD_DIM, "rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL},
        switch=ORIGINAL,
    ),
    "seed_oss": Decoder(model_type="seed_oss", values={**LLAMA, **BIASED, **theta(100.0), "attention_out_bias": True}),
    "helium": Decoder(
        model_type="helium",
        values={**LLAMA, **theta(100.0), "hidden_size": 96, "attention_bias": True, "mlp_bias": True},
    ),
    "glm": Decoder(model_type="glm", values={**LLAMA, **theta(100.0, partial_rotary_factor=0.5)}),
    "glm4": Decoder(model_type="glm4", values={**LLAMA, **theta(100.0, partial_rotary_factor=0.5)}),
    "phi": Decoder(
        model_type="phi",
        values={**LLAMA, **theta(100.0, partial_rotary_factor=0.5)},
        residual_norm=2,
        gated=0,
    ),
    "phi with q/k norms": Decoder(
        model_type="phi",
        values={**WITHOUT_HEAD_DIM, **theta(100.0, partial_rotary_factor=0.5), "qk_layernorm": True},
        residual_norm=2,
        gated=0,
    ),
    "cohere": Decoder(
        model_type="cohere",
        values={**LLAMA, **theta(100.0), "attention_bias": True, "logit_scale": 0.3},
        residual_norm=2,
    ),
    "cohere with q/k norms": Decoder(
        model_type="cohere",
        values={**LLAMA, **theta(100.0), "use_qk_norm": True},
        residual_norm=2,
    ),
    "stablelm": Decoder(
        model_type="stablelm",
        values={**WITHOUT_HEAD_DIM, **theta(100.0, partial_rotary_factor=0.25), "use_qkv_bias": True},
    ),
    "stablelm parallel": Decoder(
        model_type="stablelm",
        values={
            **WITHOUT_HEAD_DIM,
            **theta(100.0, partial_rotary_factor=0.25),
            "use_parallel_residual": True,
        },
        residual_norm=2,
    ),
    "stablelm with q/k norms": Decoder(
        model_type="stablelm",
        values={**WITHOUT_HEAD_DIM, **theta(100.0, partial_rotary_factor=0.25), "qk_layernorm": True},
    ),
    "starcoder2": Decoder(
        model_type="starcoder2",
        values={**LLAMA, **theta(100.0), "sliding_window": WINDOW},
        gated=0,
        window=WINDOW,
    ),
    "gpt_neox": Decoder(
        model_type="gpt_neox",
        values={**OWN_HEADS, **theta(100.0, partial_rotary_factor=0.25)},
        residual_norm=2,
        gated=0,
    ),
    "gpt_neox serial": Decoder(
        model_type="gpt_neox",
        values={**OWN_HEADS, **theta(100.0, partial_rotary_factor=0.5), "use_parallel_residual": False},
        gated=0,
    ),
    "gpt_neo": Decoder(
        model_type="gpt_neo",
        values={
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 44,
            "num_layers": 2,
            "num_heads": 3,
            "max_position_embeddings": POSITIONS,
            "window_size": WINDOW,
            "attention_types": [[["global", "local"], 1]],
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        residual_norm=5,
        gated=0,
        window=WINDOW,
    ),
    "gpt2": Decoder(model_type="gpt2", values=GPT2, residual_norm=5, gated=0),
    "gpt2 scaled by layer": Decoder(
        model_type="gpt2",
        values={**GPT2, "n_inner": None, "scale_attn_by_inverse_layer_idx": True},
        residual_norm=5,
        gated=0,
    ),
    "opt": Decoder(model_type="opt", values=OPT, residual_norm=5, gated=0),
    "opt post-norm": Decoder(model_type="opt", values={**OPT, "do_layer_norm_before": False}, residual_norm=4, gated=0),
    "opt with narrow ids": Decoder(
        model_type="opt",
        values={**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
        residual_norm=4,
        gated=0,
    ),
    "falcon": Decoder(model_type="falcon", values={**FALCON, **theta(100.0)}, residual_norm=2, gated=0),
    "falcon serial": Decoder(
        model_type="falcon",
        values={**FALCON, **theta(100.0), "parallel_attn": False, "multi_query": False, "bias": True},
        gated=0,
    ),
    "falcon new": Decoder(
        model_type="falcon",
        values={**FALCON, **theta(100.0), "new_decoder_architecture": True, "num_kv_heads": 2},
        residual_norm=2,
        gated=0,
    ),
    "falcon with alibi": Decoder(
        model_type="falcon",
        values={**FALCON, "alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
        gated=0,
        attention="sdpa",
    ),
    "bloom": Decoder(
        model_type="bloom",
        values={
            **{key: OWN_HEADS[key] for key in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")},
            "n_layer": 2,
            "n_head": 6,
            "seq_length": POSITIONS,
        },
        gated=0,
    ),
    "falcon new, one norm": Decoder(
        model_type="falcon",
        values={
            **FALCON,
            **theta(100.0),
            "new_decoder_architecture": True,
            "num_kv_heads": 3,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
        },
        residual_norm=2,
        gated=0,
    ),
}


@functools.cache
def make_decoder(name: str, seed: int = 0) -> Any:
    """The transformers model of DECODERS[name]; shared, so leave it as it is."""
    decoder = DECODERS[name]
    config = AutoConfig.for_model(decoder.model_type, **decoder.values)
    config._attn_implementation, config._experts_implementation = decoder.attention, "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=decoder.attention).eval()
    generator = torch.Generator().manual_seed(seed)
    corrections = [pair for pair in model.named_buffers() if pair[0].endswith("correction_bias")]
    with torch.no_grad():
        for path, parameter in [*model.named_parameters(), *corrections]:
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and path.endswith("weight"):
                is_head_norm = any(part in path for part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"))
                sharpness = 1.5 if is_head_norm else 1.0
                parameter.copy_(sharpness * (1 + 0.3 * noise))
            elif path.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * noise)
            else:
                is_query = any(part in path for part in ("q_proj", "k_proj", "q_b_", "kv_a_", "qkv", "query", "c_attn"))
                fan_in = parameter.shape[0] if "attn.c_" in path or ".mlp.c_" in path else parameter.shape[-1]
                fan_in = parameter.shape[-2] if decoder.model_type == "gpt_oss" and "experts" in path else fan_in
                parameter.copy_(noise * (_SHARPNESS if is_query else 1.0) * fan_in**-0.5)
    return model


def decoder_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of whole texts, without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits
