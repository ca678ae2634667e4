"""What a Hugging Face decoder calls its tensors, one record a naming, and which of them its parameters are.

In: the files' inventory, a naming, a config. Out: where each parameter is, and notes. It reads no weights by itself.

Shapes: `N` query heads, `K` key/value heads, `H` head size.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from graphport.model_def.checkpoint_record import account_for_tensors, stored_name
from graphport.model_def.config import AttentionConfig, FeedForwardConfig, TransformerConfig
from graphport.model_def.expert_config import ExpertsConfig
from graphport.model_def.expert_tensors import EXPERTS, MIXTRAL, QWEN_MOE, ExpertTensors
from graphport.model_def.safetensors_files import WeightFiles, check_dtypes
from graphport.model_def.stored_parts import StackedPart, StoredPart, needed_shapes
from graphport.model_def.transformer import parameter_shapes

# stacked: all query heads, all key heads, all value heads. grouped: for each key/value head its query heads, itself,
# its value head (one of each where every query head has its own)
Layout = Literal["stacked", "grouped"]

# buffers that old versions of transformers saved; computed from the config here
_HARMLESS = (
    *("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "masked_bias"),
    *(".attn.bias", ".attention.bias"),  # causal masks of GPT-2 and GPT-NeoX
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTensors:
    """How a family names its tensors.

    `prefix` stands before all but the head, except in files saved without a head. `modules` maps the modules of a block
    to those of `blocks`.{i}; what several of ours map to is one matrix: query, key and value in the order `qkv`, gate
    and up one after the other. `is_transposed`: the matrices of blocks are [in, out] (GPT-2's Conv1D). `experts`: the
    namings of experts that occur.
    """

    modules: Mapping[str, str]
    prefix: str = "model."
    embedding: str = "embed_tokens"
    position: str = "embed_positions"
    final_norm: str = "norm"
    blocks: str = "layers"
    heads: tuple[str, ...] = ("lm_head",)
    qkv: Layout = "stacked"
    is_transposed: bool = False
    experts: tuple[ExpertTensors, ...] = ()

    def outer(self, prefix: str, head: str) -> dict[str, str]:
        """Our parameters outside the blocks to the files' names."""
        modules = {
            "embedding": prefix + self.embedding,
            "position": prefix + self.position,
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
        "attention.output": "self_attn.dense",
        "attention_norm": "input_layernorm",
        "feed_forward.up": "mlp.fc1",
        "feed_forward.down": "mlp.fc2",
    },
    final_norm="final_layernorm",
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
FALCON_TWO_NORMS = dataclasses.replace(
    FALCON, modules={**FALCON.modules, "attention_norm": "ln_attn", "feed_forward_norm": "ln_mlp"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDecoder:
    """The files of a decoder and the names that they use."""

    files: WeightFiles
    tensors: DecoderTensors
    prefix: str
    head: str

    @staticmethod
    def of(files: WeightFiles, tensors: DecoderTensors) -> "StoredDecoder":
        """The spelling of prefix and head that `files` have."""
        has_prefix = any(name.startswith(tensors.prefix) for name in files.tensors)
        present = [head for head in tensors.heads if f"{head}.weight" in files.tensors]
        head = (*present, *tensors.heads)[0]
        return StoredDecoder(files=files, tensors=tensors, prefix=tensors.prefix if has_prefix else "", head=head)

    @property
    def embedding_name(self) -> str:
        """The name of the embedding's tensor."""
        return f"{self.prefix}{self.tensors.embedding}.weight"

    @property
    def head_name(self) -> str:
        """The name of the head's tensor, whether it is there or not."""
        return f"{self.head}.weight"

    def find(self, where: str, config: TransformerConfig) -> tuple[dict[str, StoredPart | StackedPart], list[str]]:
        """Where each parameter of `config` is in the files, and notes on what is ignored and converted.

        Raises CheckpointError for what is missing, extra or of the wrong shape. A tied head that is stored beside its
        embedding was compared before (see `huggingface.py`) and is left out.
        """
        shapes = parameter_shapes(config)
        parts = {name: self._place(name, config) for name in shapes}
        stored = self.files.tensors
        if config.head == "tied" and self.embedding_name not in stored and self.head_name in stored:
            parts["embedding.weight"] = StoredPart(self.head_name)
        needed = needed_shapes(parts, shapes)
        harmless = sorted(name for name in stored if name.endswith(_HARMLESS) and name not in needed)
        second_copy = {self.head_name} - needed.keys() if config.head == "tied" else set()
        present = {name: tensor for name, tensor in stored.items() if name not in {*harmless, *second_copy}}
        account_for_tensors(where, found={name: tensor.shape for name, tensor in present.items()}, needed=needed)
        notes = check_dtypes(Path(where), present)
        return parts, [*notes, f"ignored tensors: {', '.join(harmless)}"] if harmless else notes

    def _place(self, name: str, config: TransformerConfig) -> StoredPart | StackedPart:
        """Where the parameter `name` is; experts have names of their own."""
        if f".{EXPERTS}" not in name:
            return self._part(name, config)
        layer = int(name.split(".")[1])
        experts = config.blocks[layer].feed_forward
        assert isinstance(experts, ExpertsConfig)
        return self._experts(layer).part(name, self.prefix + self.tensors.blocks, experts)

    def _experts(self, layer: int) -> ExpertTensors:
        namings, blocks = self.tensors.experts, self.prefix + self.tensors.blocks
        return next((naming for naming in namings if naming.is_in(self.files.tensors, blocks, layer)), namings[0])

    def _part(self, name: str, config: TransformerConfig) -> StoredPart:
        tensors = self.tensors
        outer, blocks = tensors.outer(self.prefix, self.head), self.prefix + tensors.blocks
        modules = tensors.modules
        if tensors.experts and name.startswith("blocks."):
            modules = {**modules, **self._experts(int(name.split(".")[1])).modules}
        stored = stored_name(name, outer=outer, blocks=blocks, modules=modules)
        if name in outer:
            return StoredPart(stored)
        _, layer, module = name.rpartition(".")[0].split(".", 2)
        block = config.blocks[int(layer)]
        is_matrix = name.endswith("weight") and not module.endswith("norm")
        rows = None
        if list(modules.values()).count(modules[module]) > 1:
            is_attention = module.startswith("attention")
            order = _qkv_rows(block.attention, tensors.qkv) if is_attention else _halves(block.dense)
            rows = order[module.rpartition(".")[2]]
        return StoredPart(stored, rows, is_transposed=tensors.is_transposed and is_matrix)


def _qkv_rows(attention: AttentionConfig, layout: Layout) -> dict[str, Tensor]:
    """The rows of query, key and value in one matrix of N + 2K heads of H rows."""
    kv_heads, group = attention.num_kv_heads, attention.num_heads // attention.num_kv_heads
    rows = torch.arange((attention.num_heads + 2 * kv_heads) * attention.head_dim)
    if layout == "stacked":
        sizes = [heads * attention.head_dim for heads in (attention.num_heads, kv_heads, kv_heads)]
        return dict(zip(("query", "key", "value"), torch.split(rows, sizes), strict=True))
    heads = rows.reshape(kv_heads, group + 2, attention.head_dim)
    parts = heads[:, :-2], heads[:, -2], heads[:, -1]
    return {name: part.reshape(-1) for name, part in zip(("query", "key", "value"), parts, strict=True)}


def _halves(feed_forward: FeedForwardConfig | None) -> dict[str, Tensor]:
    assert feed_forward is not None
    width = feed_forward.width
    return {"gate": torch.arange(width), "up": torch.arange(width, 2 * width)}
