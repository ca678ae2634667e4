"""What GGUF files call their tensors, and where each of our parameters lies in them: a tensor, or some of its rows.

In: a parsed `GgufFile` and a configuration. Out: one `GgufPart` a parameter, all tensors accounted for. It reads no
weights (see `gguf.py`).
"""

from typing import NamedTuple

from graphport.model_def.checkpoint_record import Shape, account_for_tensors, stored_name
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
    "attention_output_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward_output_norm": "post_ffw_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.experts.gate": "ffn_gate_exps",
    "feed_forward.experts.up": "ffn_up_exps",
    "feed_forward.experts.down": "ffn_down_exps",
    "feed_forward.shared.gate": "ffn_gate_shexp",
    "feed_forward.shared.up": "ffn_up_shexp",
    "feed_forward.shared.down": "ffn_down_shexp",
    "feed_forward.shared_gate": "ffn_gate_inp_shexp",
}

# names in layers that have attn_norm_2 or attn_qkv; of Falcon's two norms beside each other the second is attention's
_SECOND_NORM = {"attention_norm": "attn_norm_2", "feed_forward_norm": "attn_norm"}
_JOINED = {f"attention.{part}": "attn_qkv" for part in ("query", "key", "value")}

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


def find_parts(file: GgufFile, config: TransformerConfig, architecture: Architecture) -> dict[str, GgufPart]:
    """Where each parameter of `config` lies in `file`.

    Where several lie in one tensor they follow each other in the order of `parameter_shapes`: query, key and value
    where a layer has attn_qkv, gate and up where the architecture names them so. Raises CheckpointError for what is
    missing, extra or of the wrong shape.
    """
    parts: dict[str, GgufPart] = {}
    needed: dict[str, Shape] = {}
    for ours, whole in parameter_shapes(config).items():
        shape = whole[1:] if ours.endswith(_VECTORS) else whole
        names = {**_BLOCK_NAMES, **architecture.names}
        for module, others in (("attn_qkv", _JOINED), ("attn_norm_2", _SECOND_NORM)):
            if ours.startswith("blocks.") and f"blk.{ours.split('.')[1]}.{module}.weight" in file.tensors:
                names |= others
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
