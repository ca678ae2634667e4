"""What a Hugging Face decoder calls its tensors, one record a naming.

In: nothing. Out: records. Where each parameter is in a folder's files stands in `stored_decoder.py`.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from graphport.model_def.expert_tensors import DEEPSEEK, GPT_OSS, MIXTRAL, QWEN_MOE, ExpertTensors

# stacked: all query heads, all key heads, all value heads. grouped: for each key/value head its query heads, itself,
# its value head (one of each where every query head has its own)
Layout = Literal["stacked", "grouped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTensors:
    """How a family names its tensors.

    `prefix` stands before all but the head, except in files saved without a head. `modules` maps the modules of a block
    to those of `blocks`.{i}; what several of ours map to is one matrix: query, key and value in the order `qkv`, gate
    and up one after the other. `is_transposed`: the matrices of blocks are [in, out] (GPT-2's Conv1D). `experts`: the
    namings of experts that occur. `has_layers_behind`: files may have layers behind the last, which predict further
    tokens and are not read.
    """

    modules: Mapping[str, str]
    prefix: str = "model."
    embedding: str = "embed_tokens"
    position: str = "embed_positions"
    embedding_norm: str = "embed_norm"
    id_projection: str = "project_in"
    head_projection: str = "project_out"
    final_norm: str = "norm"
    blocks: str = "layers"
    heads: tuple[str, ...] = ("lm_head",)
    qkv: Layout = "stacked"
    is_transposed: bool = False
    experts: tuple[ExpertTensors, ...] = ()
    has_layers_behind: bool = False

    def outer(self, prefix: str, head: str) -> dict[str, str]:
        """Our parameters outside the blocks to the files' names."""
        modules = {
            "embedding": prefix + self.embedding,
            "position": prefix + self.position,
            "embedding_norm": prefix + self.embedding_norm,
            "id_projection": prefix + self.id_projection,
            "head_projection": prefix + self.head_projection,
            "final_norm": prefix + self.final_norm,
            "head": head,
        }
        return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")}


_ATTENTION = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
}
_GATED = {
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_PRE_NORMS = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}


def _fused_qkv(module: str) -> dict[str, str]:
    return {f"attention.{part}": module for part in ("query", "key", "value")}


LLAMA = DecoderTensors(modules=_ATTENTION | _GATED | _PRE_NORMS)
MIXTRAL_EXPERTS = dataclasses.replace(LLAMA, experts=MIXTRAL)
QWEN_EXPERTS = dataclasses.replace(LLAMA, experts=QWEN_MOE)
GPT_OSS_SINKS = DecoderTensors(
    modules={**_ATTENTION, **_PRE_NORMS, "attention.sinks": "self_attn.sinks"}, experts=GPT_OSS
)
_LATENT = {
    "attention.latent.down": "self_attn.kv_a_proj_with_mqa",
    "attention.latent.norm": "self_attn.kv_a_layernorm",
    "attention.latent.up": "self_attn.kv_b_proj",
    "attention.output": "self_attn.o_proj",
}
DEEPSEEK_QUERY = DecoderTensors(
    modules={**_LATENT, "attention.latent.query": "self_attn.q_proj", **_GATED, **_PRE_NORMS},
    experts=DEEPSEEK,
    has_layers_behind=True,
)
DEEPSEEK_LATENT_QUERY = dataclasses.replace(
    DEEPSEEK_QUERY,
    modules={
        **DEEPSEEK_QUERY.modules,
        "attention.latent.query_down": "self_attn.q_a_proj",
        "attention.latent.query_norm": "self_attn.q_a_layernorm",
        "attention.latent.query": "self_attn.q_b_proj",
    },
)
GEMMA_SANDWICH = DecoderTensors(
    modules={
        **_ATTENTION,
        **_GATED,
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_output_norm": "post_feedforward_layernorm",
    }
)
OLMO2 = DecoderTensors(
    modules={
        **_ATTENTION,
        **_GATED,
        "attention_output_norm": "post_attention_layernorm",
        "feed_forward_output_norm": "post_feedforward_layernorm",
    }
)
PHI3 = DecoderTensors(
    modules={
        **_fused_qkv("self_attn.qkv_proj"),
        "attention.output": "self_attn.o_proj",
        "feed_forward.gate": "mlp.gate_up_proj",
        "feed_forward.up": "mlp.gate_up_proj",
        "feed_forward.down": "mlp.down_proj",
        **_PRE_NORMS,
    }
)
GLM = DecoderTensors(
    modules={**LLAMA.modules, "feed_forward.gate": "mlp.gate_up_proj", "feed_forward.up": "mlp.gate_up_proj"}
)
GLM4 = DecoderTensors(
    modules={
        **GLM.modules,
        "attention_output_norm": "post_self_attn_layernorm",
        "feed_forward_output_norm": "post_mlp_layernorm",
    }
)
PHI = DecoderTensors(
    modules={
        **_ATTENTION,
        "attention.query_norm": "self_attn.q_layernorm",
        "attention.key_norm": "self_attn.k_layernorm",
        "attention.output": "self_attn.dense",
        "attention_norm": "input_layernorm",
        "feed_forward.up": "mlp.fc1",
        "feed_forward.down": "mlp.fc2",
    },
    final_norm="final_layernorm",
)
STABLELM = dataclasses.replace(
    LLAMA,
    modules={
        **LLAMA.modules,
        "attention.query_norm": "self_attn.q_layernorm.norms.{}",
        "attention.key_norm": "self_attn.k_layernorm.norms.{}",
    },
)
STARCODER2 = DecoderTensors(
    modules={**_ATTENTION, **_PRE_NORMS, "feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}
)
GPT2 = DecoderTensors(
    modules={
        **_fused_qkv("attn.c_attn"),
        "attention.output": "attn.c_proj",
        "attention_norm": "ln_1",
        "feed_forward_norm": "ln_2",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    },
    prefix="transformer.",
    embedding="wte",
    position="wpe",
    final_norm="ln_f",
    blocks="h",
    is_transposed=True,
)
GPT_NEO = DecoderTensors(
    modules={
        "attention.query": "attn.attention.q_proj",
        "attention.key": "attn.attention.k_proj",
        "attention.value": "attn.attention.v_proj",
        "attention.output": "attn.attention.out_proj",
        "attention_norm": "ln_1",
        "feed_forward_norm": "ln_2",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    },
    prefix="transformer.",
    embedding="wte",
    position="wpe",
    final_norm="ln_f",
    blocks="h",
)
GPT_NEOX = DecoderTensors(
    modules={
        **_fused_qkv("attention.query_key_value"),
        "attention.output": "attention.dense",
        **_PRE_NORMS,
        "feed_forward.up": "mlp.dense_h_to_4h",
        "feed_forward.down": "mlp.dense_4h_to_h",
    },
    prefix="gpt_neox.",
    embedding="embed_in",
    final_norm="final_layer_norm",
    heads=("embed_out", "lm_head"),
    qkv="grouped",
)
OPT = DecoderTensors(
    modules={
        **_ATTENTION,
        "attention.output": "self_attn.out_proj",
        "attention_norm": "self_attn_layer_norm",
        "feed_forward_norm": "final_layer_norm",
        "feed_forward.up": "fc1",
        "feed_forward.down": "fc2",
    },
    embedding="decoder.embed_tokens",
    position="decoder.embed_positions",
    final_norm="decoder.final_layer_norm",
    blocks="decoder.layers",
    id_projection="decoder.project_in",
    head_projection="decoder.project_out",
)
FALCON = DecoderTensors(
    modules={
        **_fused_qkv("self_attention.query_key_value"),
        "attention.output": "self_attention.dense",
        **_PRE_NORMS,
        "feed_forward.up": "mlp.dense_h_to_4h",
        "feed_forward.down": "mlp.dense_4h_to_h",
    },
    prefix="transformer.",
    embedding="word_embeddings",
    final_norm="ln_f",
    blocks="h",
    qkv="grouped",
)
BLOOM = dataclasses.replace(FALCON, embedding_norm="word_embeddings_layernorm")
FALCON_TWO_NORMS = dataclasses.replace(
    FALCON, modules={**FALCON.modules, "attention_norm": "ln_attn", "feed_forward_norm": "ln_mlp"}
)
