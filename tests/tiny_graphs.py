"""Tiny decoders and graphs for the export tests: configs, sharp random weights, feeds, sessions, before and after.

In: a config. Out: modules, onnx_ir graphs and the numbers ONNX Runtime computes with its own optimiser off.
Seeded; nothing is read from disk.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from parity import difference

from graphport.export.bundle import write_graph
from graphport.export.function_bodies import attach_function
from graphport.export.graph_pass import CompilePlan, PassReport
from graphport.export.pipeline import compile_graph
from graphport.export.targets import CPU, Target
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import LearnedPosition, RotaryPosition, SinusoidalPosition
from graphport.model_def.signature import GRAPH_FILE, DType, Signature, TensorSpec, decoder_signature
from graphport.model_def.transformer import Transformer

CAPACITY = 40
MAX_LENGTH = 64
Feed = dict[str, NDArray[Any]]
Outputs = dict[str, NDArray[Any]]


def make_block(
    attention: Mapping[str, Any] | None = None, feed_forward: Mapping[str, Any] | None = None, **changes: Any
) -> BlockConfig:
    """Query heads, kv heads and head size are all different; the rotary width allows every kernel."""
    heads: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rotary": RotaryPosition(theta=1e4)}
    fields: dict[str, Any] = {"norm": NormConfig(), **changes}
    return BlockConfig(
        attention=AttentionConfig(**{**heads, **(attention or {})}),
        feed_forward=FeedForwardConfig(**{"width": 40, **(feed_forward or {})}),
        **fields,
    )


def make_config(*blocks: BlockConfig, **changes: Any) -> TransformerConfig:
    """Two Llama-like layers, tied head, unless told otherwise."""
    fields: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 48,
        "max_positions": MAX_LENGTH,
        "blocks": blocks or (make_block(), make_block()),
        "final_norm": NormConfig(),
    }
    return TransformerConfig(**{**fields, **changes})


LAYER_NORM = NormConfig(kind="layer", bias=True, epsilon=1e-5)
_GPT = make_block(
    {"num_kv_heads": 4, "rotary": None, "qkv_bias": True, "output_bias": True},
    {"activation": "gelu_tanh", "gated": False, "bias": True},
    norm=LAYER_NORM,
)

CONFIGS: dict[str, TransformerConfig] = {
    "llama": make_config(),
    "gpt": make_config(_GPT, _GPT, position=LearnedPosition(max_positions=MAX_LENGTH), final_norm=LAYER_NORM),
    "gemma": make_config(
        make_block(
            {"qk_norm": NormConfig(unit_offset=True), "window": 6, "softcap": 20.0, "scale": 0.2, "num_kv_heads": 1},
            {"activation": "gelu_tanh"},
            norm=NormConfig(unit_offset=True),
            norm_order="sandwich",
        ),
        make_block(
            {"qk_norm": NormConfig(unit_offset=True), "num_kv_heads": 1},
            {"activation": "gelu_tanh"},
            norm=NormConfig(unit_offset=True),
            norm_order="sandwich",
        ),
        embedding_scale=48**0.5,
        final_norm=NormConfig(unit_offset=True),
        logit_softcap=30.0,
    ),
    "post": make_config(
        *[make_block({"rotary": None, "qkv_bias": True}, {"activation": "relu"}, norm_order="post")] * 2,
        position=SinusoidalPosition(max_positions=MAX_LENGTH),
        final_norm=None,
        head="separate",
        head_bias=True,
        logit_scale=0.5,
    ),
    "mixed": make_config(
        make_block({"head_dim": 8, "num_kv_heads": 4, "rotary": RotaryPosition(theta=1e4, interleaved=True)}),
        make_block({"rotary": None}, {"activation": "gelu"}, norm_order="post"),
        make_block({"head_dim": 12}, {"gated": False, "activation": "silu"}),
        head="separate",
    ),
}


def make_model(config: TransformerConfig, *, seed: int = 0) -> Transformer:
    """Random weights in eval mode: sharp attention, biases not zero, norms away from 1, logits apart."""
    model = Transformer(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(parameter + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                sharpness = 2.5 if "query" in name or "key" in name else 1.0
                parameter.copy_(noise * sharpness * parameter.shape[-1] ** -0.5)
    return model


@functools.cache
def tiny_model(name: str) -> Transformer:
    """The model of CONFIGS[name]; shared, so leave it as it is."""
    return make_model(CONFIGS[name])


@functools.cache
def _exported(name: str) -> ir.Model:
    return export_decoder(tiny_model(name))


def exported(name: str) -> ir.Model:
    """A fresh copy of the exported graph of CONFIGS[name], which is traced once a process."""
    return _exported(name).clone()


def compiled(name: str, precision: str = "fp32", *, target: Target = CPU) -> tuple[ir.Model, tuple[PassReport, ...]]:
    model = exported(name)
    return model, compile_graph(model, make_plan(CONFIGS[name], precision, target=target))


def export_decoder(model: Transformer, *, max_length: int = MAX_LENGTH) -> ir.Model:
    return torch_to_onnx(CachedDecoder(model, max_length=max_length), decoder_signature(model.config))


def make_plan(
    config: TransformerConfig, precision: str = "fp32", *, target: Target = CPU, **changes: Any
) -> CompilePlan:
    row = target.precision(precision)
    return CompilePlan(config=config, target=target, precision=row, max_length=config.max_positions, **changes)


def decoder_feed(
    config: TransformerConfig, lengths: Sequence[int], num_new: int, *, seed: int = 0, capacity: int = CAPACITY
) -> Feed:
    """One step of `num_new` tokens a row; `lengths` are the tokens cached before it, in a cache that is NaN beyond."""
    random = np.random.default_rng(seed)
    batch = len(lengths)
    feed: Feed = {
        "input_ids": random.integers(config.vocab_size, size=(batch, num_new)),
        "seqlens_k": np.array([length + num_new - 1 for length in lengths], np.int32),
        "total_sequence_length": np.array(max(lengths) + num_new, np.int32),
        "logits_rows": np.arange(batch * num_new, dtype=np.int64),
    }
    for spec in decoder_signature(config).inputs[4:]:
        shape = (batch, spec.shape[1], capacity, spec.shape[3])
        cache = np.full(shape, np.nan, np.float32)
        for row, length in enumerate(lengths):
            cache[row, :, :length] = random.standard_normal((shape[1], length, shape[3]))
        feed[spec.name] = cache
    return feed


def eager_step(model: Transformer, feed: Feed) -> Outputs:
    step = CachedDecoder(model, max_length=model.config.max_positions)
    names = [spec.name for spec in decoder_signature(model.config).outputs]
    with torch.inference_mode():
        return dict(zip(names, (out.numpy() for out in step(*map(torch.from_numpy, feed.values()))), strict=True))


def open_graph(model: ir.Model) -> ort.InferenceSession:
    """A session over the graph as it is: ONNX Runtime's optimiser off."""
    return _session(ir.to_proto(model).SerializeToString())


def open_folder(folder: Path) -> ort.InferenceSession:
    return _session(str(folder.resolve() / GRAPH_FILE))


def run_graph(model: ir.Model, feed: Feed) -> Outputs:
    return run_session(open_graph(model), feed)


def run_session(session: ort.InferenceSession, feed: Feed) -> Outputs:
    return dict(zip((out.name for out in session.get_outputs()), session.run(None, feed), strict=True))


def save_and_open(model: ir.Model, folder: Path) -> ort.InferenceSession:
    folder.mkdir(parents=True, exist_ok=True)
    write_graph(model, folder)
    return open_folder(folder)


def valid_part(name: str, value: NDArray[Any], feed: Feed) -> NDArray[Any]:
    """A cache without what lies beyond each row's text (unspecified); any other output as it is."""
    if not name.startswith("present"):
        return value
    return np.concatenate([value[row, :, : last + 1].ravel() for row, last in enumerate(feed["seqlens_k"])])


def largest_difference(found: Outputs, wanted: Outputs, feed: Feed) -> float:
    assert list(found) == list(wanted)
    return max(
        difference(valid_part(name, found[name], feed), valid_part(name, wanted[name], feed)).max_abs for name in wanted
    )


def count_ops(model: ir.Model) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in model.graph:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def interface(model: ir.Model) -> list[tuple[object, ...]]:
    """Names, order, dtypes and shapes of the graph's inputs and outputs."""
    return [
        (kind, value.name, value.dtype, str(value.shape))
        for kind, values in (("in", model.graph.inputs), ("out", model.graph.outputs))
        for value in values
    ]


def change_attention(config: TransformerConfig, **changes: Any) -> TransformerConfig:
    """The same config with other attention fields in every block."""
    blocks = tuple(
        dataclasses.replace(block, attention=dataclasses.replace(block.attention, **changes)) for block in config.blocks
    )
    return dataclasses.replace(config, blocks=blocks)


class TinyGraph:
    """A graph built by hand, node by node; `graphport` nodes get their bodies."""

    def __init__(self) -> None:
        self._inputs: list[ir.Value] = []
        self._nodes: list[ir.Node] = []
        self._weights: list[ir.Value] = []

    def input(self, name: str, *shape: int | str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._inputs.append(value)
        return value

    def weight(self, name: str, *shape: int, values: NDArray[Any] | None = None) -> ir.Value:
        if values is None:
            values = np.random.default_rng(len(self._weights)).standard_normal(shape).astype(np.float32)
        tensor = ir.tensor(values, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(values.shape), const_value=tensor)
        self._weights.append(value)
        return value

    def node(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        shape: Sequence[int | str] | None = None,
        domain: str = "",
        num_outputs: int = 1,
        **attributes: Any,
    ) -> Any:
        name = f"{op_type}_{len(self._nodes)}"
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=num_outputs, name=name)
        for index, value in enumerate(node.outputs):
            value.name, value.dtype = f"{name}_{index}", ir.DataType.FLOAT
            value.shape = None if shape is None else ir.Shape(shape)
        self._nodes.append(node)
        return node.outputs[0] if num_outputs == 1 else node.outputs

    def linear(self, x: ir.Value, weight: ir.Value, bias: ir.Value | None = None) -> Any:
        assert x.shape is not None
        assert weight.shape is not None
        shape = [*x.shape[:-1], weight.shape[0]]
        product = self.node("Linear", x, weight, shape=shape, domain="graphport")
        return product if bias is None else self.node("Add", product, bias, shape=shape)

    def build(self, **outputs: ir.Value) -> ir.Model:
        for name, value in outputs.items():
            value.name = name
        opsets = {"": 23, "graphport": 1, "com.microsoft": 1}
        graph = ir.Graph(
            self._inputs, outputs.values(), nodes=self._nodes, initializers=self._weights, opset_imports=opsets
        )
        model = ir.Model(graph, ir_version=10)
        for node in self._nodes:
            if node.domain == "graphport":
                attach_function(model, node.op_type)
        return model


def tensor(name: str, *shape: int | str, dtype: DType = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def signature(inputs: TensorSpec | Sequence[TensorSpec], *outputs: TensorSpec) -> Signature:
    return Signature(inputs=(inputs,) if isinstance(inputs, TensorSpec) else tuple(inputs), outputs=outputs)


def _session(model: str | bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
