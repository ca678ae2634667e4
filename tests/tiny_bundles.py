"""A tiny decoder bundle built by hand on GroupQueryAttention, and an independent numpy reference of it.

In: a folder and a few sizes. Out: a bundle on disk, its weights, logits computed in float64. No exporter is involved.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import tokenizers
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from tokenizers import decoders, models, pre_tokenizers, trainers

from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import RotaryPosition
from graphport.model_def.signature import (
    CHAT_TEMPLATE_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    DType,
    FileRecord,
    GenerationDefaults,
    Manifest,
    Signature,
    decoder_signature,
    past_key,
    past_value,
    present_key,
    present_value,
)

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB = 2, 40, 4, 2, 16, 24, 283
THETA, EPSILON = 10000.0, 1e-6
MAX_LENGTH = 128
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyBundle:
    """Where the bundle lies and the weights in it."""

    folder: Path
    weights: Weights


def tiny_config(max_length: int = MAX_LENGTH) -> TransformerConfig:
    norm = NormConfig(epsilon=EPSILON)
    attention = AttentionConfig(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, rotary=RotaryPosition(theta=THETA)
    )
    block = BlockConfig(attention=attention, feed_forward=FeedForwardConfig(width=WIDTH), norm=norm)
    return TransformerConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        max_positions=max_length,
        blocks=(block,) * LAYERS,
        final_norm=norm,
        head="separate",
    )


def tiny_weights(seed: int = 0) -> Weights:
    """Random weights scaled so that attention is far from uniform and top logits are apart."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> NDArray[np.float32]:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    weights = {
        "embedding": normal(VOCAB, HIDDEN, scale=1.0),
        "head": normal(HIDDEN, VOCAB, scale=0.4),
        "final_norm": 1 + normal(HIDDEN, scale=0.3),
    }
    query_width, kv_width = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        qkv = normal(HIDDEN, query_width + 2 * kv_width, scale=HIDDEN**-0.5)
        qkv[:, : query_width + kv_width] *= 1.7
        weights[f"{layer}.qkv"] = qkv
        weights[f"{layer}.output"] = normal(query_width, HIDDEN, scale=2 * query_width**-0.5)
        weights[f"{layer}.gate_up"] = normal(HIDDEN, 2 * WIDTH, scale=HIDDEN**-0.5)
        weights[f"{layer}.down"] = normal(WIDTH, HIDDEN, scale=WIDTH**-0.5)
        weights[f"{layer}.attention_norm"] = 1 + normal(HIDDEN, scale=0.3)
        weights[f"{layer}.feed_forward_norm"] = 1 + normal(HIDDEN, scale=0.3)
    return weights


def rotary_angles(positions: NDArray[Any]) -> NDArray[np.float64]:
    frequencies = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    return np.asarray(positions)[:, None] * frequencies


def reference_logits(
    weights: Weights,
    ids: list[int],
    *,
    shift_from: int | None = None,
    hide_before: int = 0,
    swap_kv_heads: bool = False,
) -> NDArray[np.float64]:
    """Logits [len, VOCAB] of `ids` in float64, all positions at once, without a cache.

    The last three arguments make it wrong on purpose, as broken caches would: positions from `shift_from` on are one
    too large; keys and values before `hide_before` are zero; the two kv heads are exchanged.
    """
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    positions = np.arange(len(ids))
    if shift_from is not None:
        positions = positions + (positions >= shift_from)
    angles = rotary_angles(positions)
    hidden = w["embedding"][np.asarray(ids)]
    for layer in range(LAYERS):
        qkv = _rms_norm(hidden, w[f"{layer}.attention_norm"]) @ w[f"{layer}.qkv"]
        hidden = hidden + _attention(qkv, angles, hide_before, swap_kv_heads) @ w[f"{layer}.output"]
        gate, up = np.split(_rms_norm(hidden, w[f"{layer}.feed_forward_norm"]) @ w[f"{layer}.gate_up"], 2, axis=-1)
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.down"]
    return _rms_norm(hidden, w["final_norm"]) @ w["head"]


def _rms_norm(x: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weight


def _attention(
    qkv: NDArray[np.float64], angles: NDArray[np.float64], hide_before: int, swap_kv_heads: bool
) -> NDArray[np.float64]:
    length = len(qkv)
    heads = qkv.reshape(length, HEADS + 2 * KV_HEADS, HEAD_DIM).transpose(1, 0, 2)
    query, key, value = np.split(heads, [HEADS, HEADS + KV_HEADS])
    query, key = _rotate(query, angles), _rotate(key, angles)
    if swap_kv_heads:
        key, value = key[::-1], value[::-1]
    key, value = key.copy(), value.copy()
    key[:, :hide_before], value[:, :hide_before] = 0, 0
    key, value = np.repeat(key, HEADS // KV_HEADS, 0), np.repeat(value, HEADS // KV_HEADS, 0)
    scores = query @ key.transpose(0, 2, 1) / np.sqrt(HEAD_DIM)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = shares / shares.sum(-1, keepdims=True) @ value
    return mixed.transpose(1, 0, 2).reshape(length, -1)


def _rotate(x: NDArray[np.float64], angles: NDArray[np.float64]) -> NDArray[np.float64]:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def tiny_model(weights: Weights, max_length: int = MAX_LENGTH, floats: DType = "float32") -> onnx.ModelProto:
    """The decoder step as an ONNX model with inline weights, computing in `floats`."""
    nodes: list[onnx.NodeProto] = []
    angles = rotary_angles(np.arange(max_length)).astype(np.float32)
    constants = {
        **weights,
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "flat": np.array([-1, HIDDEN], np.int64),
    }

    def add(op: str, inputs: list[str], outputs: str | list[str], domain: str = "", **attributes: Any) -> None:
        names = [outputs] if isinstance(outputs, str) else outputs
        nodes.append(helper.make_node(op, inputs, names, name=f"{op}_{len(nodes)}", domain=domain, **attributes))

    def norm(x: str, weight: str, y: str) -> None:
        add("SimplifiedLayerNormalization", [x, weight], y, axis=-1, epsilon=EPSILON, stash_type=1)

    add("Gather", ["embedding", "input_ids"], "hidden.0")
    for i in range(LAYERS):
        norm(f"hidden.{i}", f"{i}.attention_norm", f"{i}.normed")
        add("MatMul", [f"{i}.normed", f"{i}.qkv"], f"{i}.packed")
        add(
            "GroupQueryAttention",
            [f"{i}.packed", "", "", past_key(i), past_value(i), "seqlens_k", "total_sequence_length", "cos", "sin"],
            [f"{i}.mixed", present_key(i), present_value(i)],
            "com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            do_rotary=1,
        )
        add("MatMul", [f"{i}.mixed", f"{i}.output"], f"{i}.attended")
        add("Add", [f"hidden.{i}", f"{i}.attended"], f"{i}.middle")
        norm(f"{i}.middle", f"{i}.feed_forward_norm", f"{i}.normed2")
        add("MatMul", [f"{i}.normed2", f"{i}.gate_up"], f"{i}.gate_up_out")
        add("Split", [f"{i}.gate_up_out"], [f"{i}.gate", f"{i}.up"], axis=-1, num_outputs=2)
        add("Sigmoid", [f"{i}.gate"], f"{i}.sigmoid")
        add("Mul", [f"{i}.gate", f"{i}.sigmoid"], f"{i}.silu")
        add("Mul", [f"{i}.silu", f"{i}.up"], f"{i}.product")
        add("MatMul", [f"{i}.product", f"{i}.down"], f"{i}.fed")
        add("Add", [f"{i}.middle", f"{i}.fed"], f"hidden.{i + 1}")
    add("Reshape", [f"hidden.{LAYERS}", "flat"], "all_rows")
    add("Gather", ["all_rows", "logits_rows"], "asked_rows")
    norm("asked_rows", "final_norm", "final")
    add("MatMul", ["final", "head"], "narrow_logits")
    add("Cast", ["narrow_logits"], "logits", to=TensorProto.FLOAT)
    signature = decoder_signature(tiny_config(max_length), floats)
    graph = helper.make_graph(
        nodes,
        "tiny",
        _value_infos(signature.inputs),
        _value_infos(signature.outputs),
        [_tensor(value, name, floats) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _tensor(value: NDArray[Any], name: str, floats: DType) -> onnx.TensorProto:
    is_float = value.dtype.kind == "f"
    return numpy_helper.from_array(
        np.ascontiguousarray(value, ml_dtypes.finfo(floats).dtype if is_float else None), name
    )


def _value_infos(specs: Any) -> list[onnx.ValueInfoProto]:
    kinds = {
        "float32": TensorProto.FLOAT,
        "float16": TensorProto.FLOAT16,
        "bfloat16": TensorProto.BFLOAT16,
        "int64": TensorProto.INT64,
        "int32": TensorProto.INT32,
    }
    return [helper.make_tensor_value_info(spec.name, kinds[spec.dtype], spec.shape) for spec in specs]


def write_tiny_bundle(
    folder: Path,
    *,
    weights: Weights | None = None,
    max_length: int = MAX_LENGTH,
    eos_token_ids: tuple[int, ...] = (),
    model: onnx.ModelProto | None = None,
    signature: Signature | None = None,
    target: str = "cpu",
    floats: DType = "float32",
    tokenizer: bool = False,
) -> TinyBundle:
    """Write a bundle into `folder`; other arguments replace parts of it, to make it wrong on purpose."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights() if weights is None else weights
    model = tiny_model(weights, max_length, floats) if model is None else model
    signature = decoder_signature(tiny_config(max_length), floats) if signature is None else signature
    (folder / WEIGHTS_FILE).unlink(missing_ok=True)
    if tokenizer:
        tiny_tokenizer().save(str(folder / TOKENIZER_FILE))
        (folder / CHAT_TEMPLATE_FILE).write_text(CHAT_TEMPLATE, encoding="utf-8")
    onnx.save(model, folder / GRAPH_FILE, save_as_external_data=True, location=WEIGHTS_FILE, size_threshold=100)
    write_manifest(folder, max_length=max_length, eos_token_ids=eos_token_ids, signature=signature, target=target)
    return TinyBundle(folder=folder, weights=weights)


def write_manifest(
    folder: Path,
    *,
    max_length: int = MAX_LENGTH,
    eos_token_ids: tuple[int, ...] = (),
    signature: Signature | None = None,
    target: str = "cpu",
) -> None:
    """Write the manifest over the files that `folder` holds now."""
    config = tiny_config(max_length)
    manifest = Manifest(
        graphport_version="0.1.0",
        kind="decoder",
        target=target,
        precision="fp32",
        max_length=max_length,
        config=config,
        signature=decoder_signature(config) if signature is None else signature,
        generation=GenerationDefaults(eos_token_ids=eos_token_ids),
        source={"format": "tiny"},
        files={path.name: _record(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST_FILE},
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE of at most VOCAB ids: 256 bytes, two special tokens, merges; nothing is added to a text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 2,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the end of the story. \U0001f600 \u4f60\u597d"], trainer)
    return tokenizer


def _record(path: Path) -> FileRecord:
    data = path.read_bytes()
    return FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
