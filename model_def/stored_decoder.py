"""Which tensors of a Hugging Face decoder's files its parameters are.

In: the files' inventory, a naming (`decoder_tensors.py`), a config. Out: where each parameter is, and notes. It reads
no weights by itself.

Shapes: `N` query heads, `K` key/value heads, `H` head size.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphport.model_def.block_config import AttentionConfig, FeedForwardConfig
from graphport.model_def.checkpoint_record import CheckpointError, account_for_tensors, stored_name
from graphport.model_def.config import TransformerConfig
from graphport.model_def.decoder_tensors import DecoderTensors, Layout
from graphport.model_def.expert_config import ExpertsConfig
from graphport.model_def.expert_tensors import EXPERTS, ExpertTensors
from graphport.model_def.microscaled_parts import MicroscaledPart
from graphport.model_def.safetensors_files import WeightFiles, check_dtypes
from graphport.model_def.stored_parts import Part, StackedPart, StoredPart, needed_shapes
from graphport.model_def.transformer import parameter_shapes

# buffers that old versions of transformers saved; computed from the config here
_HARMLESS = (
    *("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "masked_bias"),
    *(".attn.bias", ".attention.bias"),  # causal masks of GPT-2 and GPT-NeoX
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

    def find(self, where: str, config: TransformerConfig) -> tuple[dict[str, Part], list[str]]:
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
        harmless += [name for name in stored if self._is_behind(name, config.num_layers)]
        second_copy = {self.head_name} - needed.keys() if config.head == "tied" else set()
        present = {name: tensor for name, tensor in stored.items() if name not in {*harmless, *second_copy}}
        account_for_tensors(where, found={name: tensor.shape for name, tensor in present.items()}, needed=needed)
        packed = {name for p in parts.values() if isinstance(p, MicroscaledPart) for name in p.shapes((0, 0, 0))}
        notes = check_dtypes(Path(where), {name: tensor for name, tensor in present.items() if name not in packed})
        if foreign := sorted(name for name in packed if stored[name].dtype != "U8"):
            raise CheckpointError(f"{where}: blocks of 4 bits must be bytes (U8), which {', '.join(foreign)} are not")
        return parts, [*notes, f"ignored tensors: {', '.join(harmless)}"] if harmless else notes

    def _is_behind(self, name: str, num_layers: int) -> bool:
        """Whether the tensor belongs to a layer behind the last, which predicts further tokens (DeepSeek-V3)."""
        rest = name.removeprefix(f"{self.prefix}{self.tensors.blocks}.")
        number = rest.partition(".")[0]
        return self.tensors.has_layers_behind and rest != name and number.isdecimal() and int(number) >= num_layers

    def _place(self, name: str, config: TransformerConfig) -> Part:
        """Where the parameter `name` is; experts have names of their own, and so have norms with a number a head."""
        if f".{EXPERTS}" not in name:
            part = self._part(name, config)
            return _of_heads(part, name, config) if "{}" in part.name else part
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
        if name in outer or name.split(".", 2)[2] in modules:
            return StoredPart(stored)
        _, layer, module = name.rpartition(".")[0].split(".", 2)
        block = config.blocks[int(layer)]
        if module == "attention.latent.query":
            return StoredPart(stored, _turning_first(block.attention))
        is_matrix = name.endswith("weight") and not module.endswith("norm")
        rows = None
        if list(modules.values()).count(modules[module]) > 1:
            is_attention = module.startswith("attention")
            order = _qkv_rows(block.attention, tensors.qkv) if is_attention else _halves(block.dense)
            rows = order[module.rpartition(".")[2]]
        return StoredPart(stored, rows, is_transposed=tensors.is_transposed and is_matrix)


def _of_heads(part: StoredPart, name: str, config: TransformerConfig) -> StackedPart:
    """The norms of the query or key heads that the parameter `name` holds."""
    attention = config.blocks[int(name.split(".")[1])].attention
    num_heads = attention.num_heads if "query" in name else attention.num_kv_heads
    return StackedPart(tuple(part.name.format(head) for head in range(num_heads)))


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


def _turning_first(attention: AttentionConfig) -> Tensor:
    """The rows of queries whose heads have the dimensions that rotate last."""
    assert attention.rotary is not None
    heads = torch.arange(attention.num_heads * attention.head_dim).reshape(attention.num_heads, -1)
    return heads.roll(attention.rotary.rotary_dim(attention.head_dim), dims=1).flatten()


def _halves(feed_forward: FeedForwardConfig | None) -> dict[str, Tensor]:
    assert feed_forward is not None
    width = feed_forward.width
    return {"gate": torch.arange(width), "up": torch.arange(width, 2 * width)}
