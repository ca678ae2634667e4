"""Every decoder family that is read, as tiny random models of transformers, in each shape that differs.

In: a name of `DECODERS`. Out: models, fp32 in eval mode, whose attention is far from uniform. Seeded; nothing is
fetched or compared.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 61
POSITIONS = 48
WINDOW = 5
ORIGINAL = 16  # where longrope changes its factors

_SHARPNESS = 2.0  # times the usual weights, for q and for k

# query heads, kv heads, head size and hidden / heads are all different
_LLAMA: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 42,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_BIASED: Mapping[str, Any] = {"attention_bias": True, "mlp_bias": True}
# the head size is hidden / heads, whatever the config says
_WITHOUT_HEAD_DIM: Mapping[str, Any] = {
    **{key: value for key, value in _LLAMA.items() if key != "head_dim"},
    "hidden_size": 96,
}
_OWN_HEADS = {key: value for key, value in _WITHOUT_HEAD_DIM.items() if key != "num_key_value_heads"}
_GPT2: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_inner": 44,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FALCON: Mapping[str, Any] = {
    **{key: value for key, value in _OWN_HEADS.items() if key != "intermediate_size"},
    "ffn_hidden_size": 44,
}
_OPT: Mapping[str, Any] = {
    **{key: value for key, value in _OWN_HEADS.items() if key != "intermediate_size"},
    "ffn_dim": 44,
    "word_embed_proj_dim": 96,
}
_EXPERTS: Mapping[str, Any] = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_QWEN_MOE: Mapping[str, Any] = {**_EXPERTS, "shared_expert_intermediate_size": 28}
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 3.0,
    "original_max_position_embeddings": ORIGINAL,
}
_DEEPSEEK: Mapping[str, Any] = {
    **{key: value for key, value in _LLAMA.items() if key not in ("head_dim", "num_key_value_heads")},
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
_LONGROPE: Mapping[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}


def _theta(theta: float, **others: Any) -> dict[str, Any]:
    """Low, so that few positions turn every pair visibly."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **others}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model type with the keys of its config, and what the config calls for on the CPU.

    `residual_norm` is the number of sums that a norm reads, `gated` and `experts` that of gated feed-forwards that
    every token runs and of mixtures of experts, `packed_qkv` that of projections in one matrix, all counted by hand.
    `window` and `switch`: the length beyond which the model would be read wrongly if the window or the scaling were
    ignored. `attention`: transformers' own, of which eager adds Falcon's ALiBi twice (5.24, by the mask too).
    """

    model_type: str
    values: Mapping[str, Any]
    residual_norm: int = 4  # two layers, each with a sum inside and one at its end
    gated: int = 2
    packed_qkv: int = 2
    experts: int = 0
    window: int | None = None
    switch: int | None = None
    attention: str = "eager"


DECODERS: Mapping[str, Decoder] = {
    "llama": Decoder(model_type="llama", values={**_LLAMA, **_BIASED, **_theta(100.0)}),
    "mistral": Decoder(
        model_type="mistral", values={**_LLAMA, **_theta(100.0), "sliding_window": WINDOW}, window=WINDOW
    ),
    "qwen2": Decoder(model_type="qwen2", values={**_LLAMA, **_theta(100.0), "hidden_size": 96}),
    "qwen3": Decoder(model_type="qwen3", values={**_LLAMA, **_theta(100.0), "attention_bias": True}),
    "mixtral": Decoder(
        model_type="mixtral",
        values={**_LLAMA, **_theta(100.0), "num_local_experts": 5, "sliding_window": WINDOW},
        gated=0,
        experts=2,
        window=WINDOW,
    ),
    "qwen2_moe": Decoder(
        model_type="qwen2_moe", values={**_LLAMA, **_theta(100.0), **_QWEN_MOE, "mlp_only_layers": []}, experts=2
    ),
    "qwen2_moe with a dense layer": Decoder(
        model_type="qwen2_moe",
        values={**_LLAMA, **_theta(100.0), **_QWEN_MOE, "mlp_only_layers": [0], "norm_topk_prob": True},
        experts=1,
    ),
    "qwen3_moe": Decoder(
        model_type="qwen3_moe",
        values={
            **_LLAMA,
            **_theta(100.0),
            **_EXPERTS,
            "attention_bias": True,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
        gated=1,
        experts=1,
    ),
    "deepseek_v2": Decoder(
        model_type="deepseek_v2",
        values={
            **_DEEPSEEK,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
            "topk_method": "group_limited_greedy",
        },
        packed_qkv=0,
        experts=1,
    ),
    "deepseek_v2 greedy": Decoder(
        model_type="deepseek_v2",
        values={**_DEEPSEEK, **_theta(100.0), "q_lora_rank": None, "attention_bias": True},
        packed_qkv=0,
        experts=1,
    ),
    "deepseek_v3": Decoder(
        model_type="deepseek_v3",
        values={
            **_DEEPSEEK,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "norm_topk_prob": True,
            "attention_bias": True,
        },
        packed_qkv=0,
        experts=1,
    ),
    "deepseek_v3 by halves": Decoder(
        model_type="deepseek_v3",
        values={
            **_DEEPSEEK,
            **_theta(100.0),
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
        packed_qkv=0,
        experts=1,
    ),
    "gpt_oss": Decoder(
        model_type="gpt_oss",
        values={
            **_LLAMA,
            "sliding_window": WINDOW,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "swiglu_limit": 1.5,
            "rope_parameters": {**_YARN, "truncate": False, "beta_fast": 8.0},
        },
        gated=0,
        experts=2,
        window=WINDOW,
    ),
    "smollm3": Decoder(
        model_type="smollm3",
        values={**_LLAMA, **_BIASED, **_theta(100.0), "no_rope_layers": [1, 0], "tie_word_embeddings": False},
    ),
    "granite": Decoder(
        model_type="granite",
        values={
            **_LLAMA,
            **_BIASED,
            **_theta(100.0),
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.5,
        },
    ),
    "olmo2": Decoder(model_type="olmo2", values={**_LLAMA, **_theta(100.0), "attention_bias": True}, residual_norm=1),
    "olmo3": Decoder(
        model_type="olmo3",
        values={
            **_LLAMA,
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
    "gemma": Decoder(model_type="gemma", values={**_LLAMA, **_theta(100.0), "num_key_value_heads": 1}),
    "gemma2": Decoder(
        model_type="gemma2",
        values={
            **_LLAMA,
            **_theta(100.0),
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
            **_LLAMA,
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
        values={**_WITHOUT_HEAD_DIM, **_theta(100.0), "sliding_window": WINDOW},
        window=WINDOW,
    ),
    "phi3 longrope": Decoder(
        model_type="phi3",
        values={**_WITHOUT_HEAD_DIM, "rope_parameters": _LONGROPE, "original_max_position_embeddings": ORIGINAL},
        switch=ORIGINAL,
    ),
    "seed_oss": Decoder(
        model_type="seed_oss", values={**_LLAMA, **_BIASED, **_theta(100.0), "attention_out_bias": True}
    ),
    "helium": Decoder(
        model_type="helium",
        values={**_LLAMA, **_theta(100.0), "hidden_size": 96, "attention_bias": True, "mlp_bias": True},
    ),
    "glm": Decoder(model_type="glm", values={**_LLAMA, **_theta(100.0, partial_rotary_factor=0.5)}),
    "glm4": Decoder(model_type="glm4", values={**_LLAMA, **_theta(100.0, partial_rotary_factor=0.5)}),
    "phi": Decoder(
        model_type="phi",
        values={**_LLAMA, **_theta(100.0, partial_rotary_factor=0.5)},
        residual_norm=2,
        gated=0,
    ),
    "phi with q/k norms": Decoder(
        model_type="phi",
        values={**_WITHOUT_HEAD_DIM, **_theta(100.0, partial_rotary_factor=0.5), "qk_layernorm": True},
        residual_norm=2,
        gated=0,
    ),
    "cohere": Decoder(
        model_type="cohere",
        values={**_LLAMA, **_theta(100.0), "attention_bias": True, "logit_scale": 0.3},
        residual_norm=2,
    ),
    "cohere with q/k norms": Decoder(
        model_type="cohere",
        values={**_LLAMA, **_theta(100.0), "use_qk_norm": True},
        residual_norm=2,
    ),
    "stablelm": Decoder(
        model_type="stablelm",
        values={**_WITHOUT_HEAD_DIM, **_theta(100.0, partial_rotary_factor=0.25), "use_qkv_bias": True},
    ),
    "stablelm parallel": Decoder(
        model_type="stablelm",
        values={
            **_WITHOUT_HEAD_DIM,
            **_theta(100.0, partial_rotary_factor=0.25),
            "use_parallel_residual": True,
        },
        residual_norm=2,
    ),
    "stablelm with q/k norms": Decoder(
        model_type="stablelm",
        values={**_WITHOUT_HEAD_DIM, **_theta(100.0, partial_rotary_factor=0.25), "qk_layernorm": True},
    ),
    "starcoder2": Decoder(
        model_type="starcoder2",
        values={**_LLAMA, **_theta(100.0), "sliding_window": WINDOW},
        gated=0,
        window=WINDOW,
    ),
    "gpt_neox": Decoder(
        model_type="gpt_neox",
        values={**_OWN_HEADS, **_theta(100.0, partial_rotary_factor=0.25)},
        residual_norm=2,
        gated=0,
    ),
    "gpt_neox serial": Decoder(
        model_type="gpt_neox",
        values={**_OWN_HEADS, **_theta(100.0, partial_rotary_factor=0.5), "use_parallel_residual": False},
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
    "gpt2": Decoder(model_type="gpt2", values=_GPT2, residual_norm=5, gated=0),
    "gpt2 scaled by layer": Decoder(
        model_type="gpt2",
        values={**_GPT2, "n_inner": None, "scale_attn_by_inverse_layer_idx": True},
        residual_norm=5,
        gated=0,
    ),
    "opt": Decoder(model_type="opt", values=_OPT, residual_norm=5, gated=0),
    "opt post-norm": Decoder(
        model_type="opt", values={**_OPT, "do_layer_norm_before": False}, residual_norm=4, gated=0
    ),
    "opt with narrow ids": Decoder(
        model_type="opt",
        values={**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
        residual_norm=4,
        gated=0,
    ),
    "falcon": Decoder(model_type="falcon", values={**_FALCON, **_theta(100.0)}, residual_norm=2, gated=0),
    "falcon serial": Decoder(
        model_type="falcon",
        values={**_FALCON, **_theta(100.0), "parallel_attn": False, "multi_query": False, "bias": True},
        gated=0,
    ),
    "falcon new": Decoder(
        model_type="falcon",
        values={**_FALCON, **_theta(100.0), "new_decoder_architecture": True, "num_kv_heads": 2},
        residual_norm=2,
        gated=0,
    ),
    "falcon with alibi": Decoder(
        model_type="falcon",
        values={**_FALCON, "alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
        gated=0,
        attention="sdpa",
    ),
    "bloom": Decoder(
        model_type="bloom",
        values={
            **{key: _OWN_HEADS[key] for key in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")},
            "n_layer": 2,
            "n_head": 6,
            "seq_length": POSITIONS,
        },
        gated=0,
    ),
    "falcon new, one norm": Decoder(
        model_type="falcon",
        values={
            **_FALCON,
            **_theta(100.0),
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
