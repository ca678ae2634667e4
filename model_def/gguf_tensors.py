"""What GGUF files call their tensors, and where each of our parameters lies in them: a tensor, or some of its rows.

In: a parsed `GgufFile` and a configuration. Out: one part a parameter, all tensors accounted for. It reads no
weights by itself (see `gguf.py`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from graphport.model_def.block_config import AttentionConfig
from graphport.model_def.checkpoint_record import Shape, account_for_tensors, as_float32, stored_name
from graphport.model_def.config import TransformerConfig
from graphport.model_def.gguf_architectures import Architecture
from graphport.model_def.gguf_file import GgufFile
from graphport.model_def.gguf_rotary import ROPE_TENSORS
from graphport.model_def.transformer import parameter_shapes

# inverse frequencies of old converters, computed from the metadata here
_IGNORED = (".attn_rot_embd", ".attn_rot_embd.weight", ".rope_freqs.weight")

# ours -> GGUF's, outside the blocks
_OUTER_NAMES = {
    f"{ours}.{kind}": f"{theirs}.{kind}"
    for ours, theirs in {
        "embedding": "token_embd",
        "position": "position_embd",
        "final_norm": "output_norm",
        "head": "output",
    }.items()
    for kind in ("weight", "bias")
}

# ours -> GGUF's, within blocks.{i} and blk.{i}; both end in .weight or .bias
_BLOCK_NAMES = {
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "attention.sinks": "attn_sinks.weight",
    "attention.latent.query_down": "attn_q_a",
    "attention.latent.query_norm": "attn_q_a_norm",
    "attention.latent.query": "attn_q",
    "attention.latent.down": "attn_kv_a_mqa",
    "attention.latent.norm": "attn_kv_a_norm",
    "attention.latent.up": "attn_kv_b",
    "attention_output_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward_output_norm": "post_ffw_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.correction": "exp_probs_b.bias",
    "feed_forward.experts.gate": "ffn_gate_exps",
    "feed_forward.experts.up": "ffn_up_exps",
    "feed_forward.experts.down": "ffn_down_exps",
    "feed_forward.shared.gate": "ffn_gate_shexp",
    "feed_forward.shared.up": "ffn_up_shexp",
    "feed_forward.shared.down": "ffn_down_shexp",
    "feed_forward.shared_gate": "ffn_gate_inp_shexp",
}

# a tensor, and names in the layers that have it
_WHERE_PRESENT = {
    "attn_qkv": {f"attention.{part}": "attn_qkv" for part in ("query", "key", "value")},
    # of Falcon's two norms beside each other the second is attention's
    "attn_norm_2": {"attention_norm": "attn_norm_2", "feed_forward_norm": "attn_norm"},
    "attn_q_b": {"attention.latent.query": "attn_q_b"},
}

# matrices of one row here, vectors in the file
_VECTORS = ("feed_forward.shared_gate.weight",)


class GgufPart(NamedTuple):
    """Where a parameter of `shape` lies: rows `first` and on of the tensor `name`, as many as it has."""

    name: str
    first: int
    shape: Shape

    @property
    def rows(self) -> slice:
        """The rows of the tensor."""
        return slice(self.first, self.first + self.shape[0])


class HeadParts(NamedTuple):
    """Where the matrix lies that makes keys and values of all heads from a latent vector: a tensor each.

    That of keys is stored [heads, in, out], as it is multiplied with queries there; that of values [heads, out, in].
    """

    key: str
    value: str

    def shapes(self, attention: AttentionConfig) -> dict[str, Shape]:
        """The shapes of both tensors."""
        assert attention.latent is not None
        assert attention.rotary is not None
        heads, rank = attention.num_heads, attention.latent.key_value_rank
        passing = attention.head_dim - attention.rotary.rotary_dim(attention.head_dim)
        return {self.key: (heads, rank, passing), self.value: (heads, attention.latent.value_dim, rank)}

    def read(self, file: GgufFile) -> Tensor:
        """The matrix as float32; a head's keys come before its values."""
        key, value = (
            as_float32(f"{file.path.name}: {name}", torch.from_numpy(file.read(name)))
            for name in (self.key, self.value)
        )
        return torch.cat((key.transpose(1, 2), value), dim=1).flatten(0, 1)


def find_parts(
    file: GgufFile, config: TransformerConfig, architecture: Architecture
) -> dict[str, GgufPart | HeadParts]:
    """Where each parameter of `config` lies in `file`.

    Where several lie in one tensor they follow each other in the order of `parameter_shapes`: query, key and value
    where a layer has attn_qkv, gate and up where the architecture names them so. Raises CheckpointError for what is
    missing, extra or of the wrong shape.
    """
    parts: dict[str, GgufPart | HeadParts] = {}
    needed: dict[str, Shape] = {}
    for ours, whole in parameter_shapes(config).items():
        shape = whole[1:] if ours.endswith(_VECTORS) else whole
        names = {**_BLOCK_NAMES, **architecture.names}
        block = f"blk.{ours.split('.')[1]}" if ours.startswith("blocks.") else ""
        for module, others in _WHERE_PRESENT.items():
            if f"{block}.{module}.weight" in file.tensors:
                names |= others
        if ours.endswith(".latent.up.weight") and f"{block}.attn_k_b.weight" in file.tensors:
            heads = HeadParts(f"{block}.attn_k_b.weight", f"{block}.attn_v_b.weight")
            needed |= heads.shapes(config.blocks[int(ours.split(".")[1])].attention)
            parts[ours] = heads
            continue
        theirs = stored_name(ours, outer=_OUTER_NAMES, blocks="blk", modules=names)
        first = needed[theirs][0] if theirs in needed else 0
        needed[theirs] = (first + shape[0], *shape[1:])
        parts[ours] = GgufPart(theirs, first, shape)
    found = {
        name: tensor.shape
        for name, tensor in file.tensors.items()
        if name not in ROPE_TENSORS and not name.endswith(_IGNORED)
    }
    account_for_tensors(str(file.path), found=found, needed=needed)
    return parts
