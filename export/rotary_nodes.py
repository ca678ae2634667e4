"""The rotation that an attention node asks for, inside it or in nodes of its own in front of it.

In: an attention node with tables among its inputs. Out: the tables, or RotaryEmbedding nodes before it. It decides
neither (see `lower_attention.py`, `lower_padded_attention.py`).
"""

from typing import NamedTuple

import onnx_ir as ir

from graphport.export.graph_pass import CONTRIB, new_node, static_dims


class Rotation(NamedTuple):
    """Tables [P, D/2] and whether pairs are neighbours."""

    cos: ir.Value
    sin: ir.Value
    is_interleaved: int

    @property
    def width(self) -> int:
        """Rotary dimensions: twice the tables' columns."""
        return 2 * static_dims(self.cos)[1]


def find_rotation(node: ir.Node, *, first: int) -> Rotation | None:
    """What an attention node rotates by: its inputs `first` and `first` + 1; None for one that does not."""
    if "rotary_interleaved" not in node.attributes:
        return None
    cos, sin = node.inputs[first : first + 2]
    assert cos is not None
    assert sin is not None
    return Rotation(cos, sin, node.attributes["rotary_interleaved"].as_int())


def rotate_before(node: ir.Node, rotation: Rotation, positions: ir.Value) -> None:
    """Rotate query and key in front of the node, at `positions` int64 [B, S] or the first one [1]."""
    query = node.inputs[0]
    assert query is not None
    for index, heads in ((0, "num_heads"), (1, "kv_num_heads")):
        rotated = new_node(
            node,
            "RotaryEmbedding",
            [node.inputs[index], positions, rotation.cos, rotation.sin],
            {
                "num_heads": node.attributes[heads].as_int(),
                "rotary_embedding_dim": rotation.width,
                "interleaved": rotation.is_interleaved,
            },
            domain=CONTRIB,
            name=f"{node.name}_rotary_{index}",
        )
        if query.dtype is not None:
            rotated.outputs[0].dtype = query.dtype
        node.replace_input_with(index, rotated.outputs[0])
