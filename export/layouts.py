"""The graph of a decoder or encoder as other runtimes call it: onnxruntime-genai, optimum and transformers.js.

In: a bundle folder with its graph. Out: beside it a graph over the same weights file, called by an attention mask. It
adds nodes in front and behind; what the bundle's own graph computes stays as it is. Settings: see `layout_files.py`.

Before: seqlens_k, total_sequence_length, logits_rows -> ... -> logits [rows, vocab]
After:  attention_mask [batch, total] -> lengths, total, rows -> ... -> logits [batch, rows a text, vocab]

Before: lengths -> ... -> hidden_states
After:  attention_mask [batch, sequence] -> lengths -> ... -> last_hidden_state

Tokens are counted from the left, so padding before a text cannot be said to the graph. What it gives for a row whose
mask begins with 0 is NaN, not the answer to another text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from graphport.export.graph_pass import CompilePlan, add_constant
from graphport.export.targets import CPU
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import (
    GRAPH_FILE,
    HIDDEN_STATES,
    INPUT_IDS,
    LENGTHS,
    LOGITS,
    LOGITS_ROWS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    unmoved_windows,
)

ATTENTION_MASK, LAST_HIDDEN_STATE = "attention_mask", "last_hidden_state"


class LayoutError(ValueError):
    """A layout that the model cannot be written in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A runtime's way of calling a decoder. `every_row`: logits of all new tokens, else of each text's last.

    `has_encoders`: it calls encoders of texts too.
    """

    name: str
    runtime: str
    graph_file: str
    every_row: bool
    has_encoders: bool


GENAI = Layout(
    name="genai", runtime="onnxruntime-genai", graph_file="genai_model.onnx", every_row=False, has_encoders=False
)
OPTIMUM = Layout(
    name="optimum",
    runtime="optimum and transformers.js",
    graph_file="optimum_model.onnx",
    every_row=True,
    has_encoders=True,
)
LAYOUTS = (GENAI, OPTIMUM)


def find_layouts(names: Sequence[str]) -> tuple[Layout, ...]:
    """The layouts called `names`, each once. Raises LayoutError for a name that is none."""
    known = {layout.name: layout for layout in LAYOUTS}
    for name in names:
        if name not in known:
            raise LayoutError(f"layout {name!r} is unknown; there are {' and '.join(known)}")
    return tuple(known[name] for name in dict.fromkeys(names))


def check_layouts(layouts: Sequence[Layout], plan: CompilePlan) -> None:
    """Raise LayoutError for a plan whose graph these runtimes cannot call."""
    for layout in layouts:
        wish = f"layout {layout.name}, for {layout.runtime},"
        if plan.target is not CPU:
            raise LayoutError(f"{wish} is for the cpu target, got {plan.target.name}; leave --layout out")
        if layout.has_encoders and reads_texts(plan.config):
            continue
        if not plan.config.is_decoder or plan.config.image is not None:
            what = "a decoder's over a KV cache" + (" or a plain text encoder's" if layout.has_encoders else "")
            raise LayoutError(f"{wish} is {what}, and this is {_kind(plan.config)}; leave --layout out")
        if plan.config.encoder is not None:
            raise LayoutError(f"{wish} is a decoder's, and this is an encoder-decoder; leave --layout out")
        shapes = {(block.attention.num_kv_heads, block.attention.head_dim) for block in plan.config.blocks}
        if len(shapes) > 1:
            raise LayoutError(f"{wish} has one shape of cache for all layers, this model has {sorted(shapes)}")
        if plan.cache is not None:
            raise LayoutError(
                f"{wish} has a KV cache in float32, which that runtime allocates, got {plan.cache.name}; choose "
                "--kv-cache auto or leave --layout out"
            )


def reads_texts(config: TransformerConfig) -> bool:
    """Whether this is an encoder of texts alone: no decoder, and nothing but ids goes in."""
    is_encoder = not config.is_decoder and not config.is_recurrent
    return is_encoder and config.vocab_size > 0 and not config.conditioned


def _kind(config: TransformerConfig) -> str:
    if config.is_recurrent:
        return "a recurrent decoder"
    if config.image is not None:
        return "an image encoder"
    return "a conditioned encoder" if config.conditioned else "an encoder"


def write_layout_graph(folder: Path, layout: Layout) -> Path:
    """Write the graph of a layout beside the bundle's own; returns its path."""
    model = ir.load(folder / GRAPH_FILE)
    adapter = _Adapter(model.graph)
    if any(value.name == LENGTHS for value in model.graph.inputs):
        adapter.adapt_encoder()
    else:
        adapter.adapt_decoder(every_row=layout.every_row)
    path = folder / layout.graph_file
    ir.save(model, path)
    return path


class _Adapter:
    """Nodes in front of a graph and behind it."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._first = graph.node(0)
        self._inputs = {value.name: value for value in graph.inputs}

    def adapt_encoder(self) -> None:
        mask = ir.val(ATTENTION_MASK, ir.DataType.INT64, ("batch", "sequence"))
        ids = self._inputs[INPUT_IDS]
        lengths = self._add("ReduceSum", [mask, self._integers(1)], keepdims=0)  # [batch]
        self._replace_input(LENGTHS, self._cast(lengths, ir.DataType.INT32))
        has_rows = LOGITS_ROWS in self._inputs
        if has_rows:
            self._replace_input(LOGITS_ROWS, self._every_row(ids))
        self._graph.inputs.insert(1, mask)
        for index, output in enumerate(list(self._graph.outputs)):
            shaped = self._as_texts(output, ids, every_row=True) if has_rows and output.name == LOGITS else output
            name = {HIDDEN_STATES: LAST_HIDDEN_STATE}.get(str(output.name), str(output.name))
            self._give(index, name, shaped, mask)

    def _as_texts(self, rows: ir.Value, ids: ir.Value, *, every_row: bool) -> ir.Value:
        """Logits [rows, vocab] as [batch, rows a text, vocab]; `every_row`: a row a token of `ids`, else one a text."""
        batch = self._end("Shape", [ids], start=0, end=1)
        count = self._end("Shape", [ids], start=1, end=2) if every_row else self._integers(1)
        shaped = self._end("Reshape", [rows, self._end("Concat", [batch, count, self._integers(-1)], axis=0)])
        vocab = rows.shape[1] if rows.shape is not None else None
        shaped.shape = ir.Shape(("batch", "sequence" if every_row else 1, vocab))
        return shaped

    def _give(self, index: int, name: str, value: ir.Value, mask: ir.Value) -> None:
        """`value` as the output `name`, NaN where the mask begins with a 0."""
        assert value.shape is not None
        known = self._begins(mask, rank=len(value.shape))
        given = self._end("Where", [known, value, self._nan()])
        self._graph.outputs[index].name = f"{name}_unmasked"
        given.name, given.type, given.shape = name, ir.TensorType(ir.DataType.FLOAT), value.shape
        self._graph.outputs[index] = given

    def adapt_decoder(self, *, every_row: bool) -> None:
        mask = ir.val(ATTENTION_MASK, ir.DataType.INT64, ("batch", "total"))
        ids = self._inputs[INPUT_IDS]
        lengths = self._add("ReduceSum", [mask, self._integers(1)], keepdims=0)  # [batch]
        total = self._add("Shape", [mask], start=1, end=2)  # [1]
        last = self._cast(self._add("Sub", [lengths, self._integers(1)]), ir.DataType.INT32)
        size = self._add("Squeeze", [self._cast(total, ir.DataType.INT32)])
        rows = self._every_row(ids) if every_row else self._last_rows(ids, lengths, total)
        replaced = {SEQLENS_K: last, TOTAL_SEQUENCE_LENGTH: size, LOGITS_ROWS: rows}
        replaced |= unmoved_windows(
            [str(name) for name in self._inputs], last, size
        )  # these runtimes keep all tokens in every layer
        for old, new in replaced.items():
            self._replace_input(old, new)
        self._graph.inputs.insert(1, mask)
        index = next(i for i, value in enumerate(self._graph.outputs) if value.name == LOGITS)
        shaped = self._as_texts(self._graph.outputs[index], ids, every_row=every_row)
        self._give(index, LOGITS, shaped, mask)

    def _every_row(self, ids: ir.Value) -> ir.Value:
        size = self._add("Size", [ids])
        return self._add("Range", [self._number(0), size, self._number(1)])

    def _last_rows(self, ids: ir.Value, lengths: ir.Value, total: ir.Value) -> ir.Value:
        """Of each text the last new token: batch * S + min(max(length - cached, 1), S) - 1, cached = total - S."""
        one = self._integers(1)
        new = self._add("Shape", [ids], start=1, end=2)
        cached = self._add("Sub", [total, new])
        own = self._add("Max", [self._add("Sub", [lengths, cached]), one])
        place = self._add("Sub", [self._add("Min", [own, new]), one])
        batch = self._add("Squeeze", [self._add("Shape", [ids], start=0, end=1)])
        begins = self._add("Mul", [self._add("Range", [self._number(0), batch, self._number(1)]), new])
        return self._add("Add", [begins, place])

    def _begins(self, mask: ir.Value, *, rank: int) -> ir.Value:
        """Whether each row's mask begins with a 1 [batch, 1, ...]."""
        first = self._end("Slice", [mask, self._integers(0), self._integers(1), self._integers(1)])  # [batch, 1]
        known = self._end("Cast", [first], to=ir.DataType.BOOL)
        return known if rank == 2 else self._end("Unsqueeze", [known, self._integers(2)])

    def _nan(self) -> ir.Value:
        return self._constant(np.array(math.nan, np.float32), "nan")

    def _replace_input(self, name: str, new: ir.Value) -> None:
        old = self._inputs[name]
        ir.convenience.replace_all_uses_with(old, new)
        self._graph.inputs.remove(old)

    def _add(self, op_type: str, inputs: list[ir.Value], **attributes: int | ir.DataType) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        self._graph.insert_before(self._first, node)
        return node.outputs[0]

    def _end(self, op_type: str, inputs: list[ir.Value], **attributes: int | ir.DataType) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        self._graph.append(node)
        return node.outputs[0]

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self._add("Cast", [value], to=dtype)

    def _integers(self, *numbers: int) -> ir.Value:
        return self._constant(np.array(numbers, np.int64), "_".join(map(str, numbers)))

    def _number(self, number: int) -> ir.Value:
        return self._constant(np.array(number, np.int64), f"scalar_{number}")

    def _constant(self, array: NDArray[Any], name: str) -> ir.Value:
        return add_constant(self._graph, f"layout.{name}", ir.tensor(array, name=f"layout.{name}"))
