"""Sizes that the tiny decoders of `tiny_decoders.py` share, and what is said of each.

In: nothing. Out: keys of configs and a record. It makes no model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCAB = 61
POSITIONS = 48
WINDOW = 5
ORIGINAL = 16  # where longrope changes its factors

# query heads, kv heads, head size and hidden / heads are all different
LLAMA: Mapping[str, Any] = {
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
BIASED: Mapping[str, Any] = {"attention_bias": True, "mlp_bias": True}
# the head size is hidden / heads, whatever the config says
WITHOUT_HEAD_DIM: Mapping[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key != "head_dim"},
    "hidden_size": 96,
}
OWN_HEADS = {key: value for key, value in WITHOUT_HEAD_DIM.items() if key != "num_key_value_heads"}
GPT2: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_inner": 44,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FALCON: Mapping[str, Any] = {
    **{key: value for key, value in OWN_HEADS.items() if key != "intermediate_size"},
    "ffn_hidden_size": 44,
}
OPT: Mapping[str, Any] = {
    **{key: value for key, value in OWN_HEADS.items() if key != "intermediate_size"},
    "ffn_dim": 44,
    "word_embed_proj_dim": 96,
}
EXPERTS: Mapping[str, Any] = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
QWEN_MOE: Mapping[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 28}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 3.0,
    "original_max_position_embeddings": ORIGINAL,
}
DEEPSEEK: Mapping[str, Any] = {
    **{key: value for key, value in LLAMA.items() if key not in ("head_dim", "num_key_value_heads")},
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
LONGROPE: Mapping[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}


def theta(theta: float, **others: Any) -> dict[str, Any]:
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


DEEPSEEK_DECODERS: Mapping[str, Decoder] = {
    "deepseek_v2": Decoder(
        model_type="deepseek_v2",
        values={
            **DEEPSEEK,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
            "topk_method": "group_limited_greedy",
        },
        packed_qkv=0,
        experts=1,
    ),
    "deepseek_v2 greedy": Decoder(
        model_type="deepseek_v2",
        values={**DEEPSEEK, **theta(100.0), "q_lora_rank": None, "attention_bias": True},
        packed_qkv=0,
        experts=1,
    ),
    "deepseek_v3": Decoder(
        model_type="deepseek_v3",
        values={
            **DEEPSEEK,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "norm_topk_prob": True,
            "attention_bias": True,
        },
        packed_qkv=0,
        experts=1,
    ),
    "deepseek_v3 by halves": Decoder(
        model_type="deepseek_v3",
        values={
            **DEEPSEEK,
            **theta(100.0),
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
        packed_qkv=0,
        experts=1,
    ),
}
