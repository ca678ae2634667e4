"""Every kind of tiny encoder through every stage: eager, exported, compiled, quantised, and placed on CUDA."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import cuda_stubs
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from parity import assert_parity
from tiny_models import attention, block, decoder, tiny_encoder_configs, tiny_model

from graphport.export.bundle import write_graph
from graphport.export.encoder_parity import STATE_TOLERANCES, check_states, compare_states
from graphport.export.encoder_runner import EncoderRunner, States
from graphport.export.graph_pass import CompilePlan
from graphport.export.model_export import export
from graphport.export.parity import ParityError
from graphport.export.pipeline import compile_graph, count_fusions
from graphport.export.quantize import quantize_blocks
from graphport.export.targets import CPU, CUDA, Target, TargetError
from graphport.export.text_feed import eager_states, parity_rows
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.model_def.certified_inputs import Row
from graphport.model_def.config import TransformerConfig
from graphport.model_def.encoder import Encoder
from graphport.model_def.ops import pool
from graphport.model_def.readout_config import PoolingConfig, PoolingKind
from graphport.model_def.signature import GRAPH_FILE, Signature, TensorSpec, encoder_signature
from graphport.model_def.transformer import Transformer
from graphport.runtime.graph_checks import SHAPE_OPS
from graphport.runtime.verification import verify

CONFIGS = {name: config for name, config in tiny_encoder_configs().items() if config.head == "none"}
EXACT = dataclasses.replace(CPU, accuracy_level=None)  # activations stay float: only the weights differ
POOLS = get_args(PoolingKind)
PRECISIONS = [p.name for p in (*CUDA.precisions, *CUDA.encoder_precisions) if not p.keeps_blocks]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """One tiny encoder, its texts, eager states of each alone, and its trace."""

    model: Transformer
    rows: list[Row]
    eager: States
    graph: ir.Model

    def compiled(self, folder: Path, target: Target, precision: str, *, optimize: bool = False) -> EncoderRunner:
        folder.mkdir()
        graph = self.graph.clone()
        compile_graph(graph, make_plan(self.model.config, target, precision))
        write_graph(graph, folder)
        return EncoderRunner(folder / GRAPH_FILE, optimize=optimize)


def make_plan(config: TransformerConfig, target: Target, precision: str) -> CompilePlan:
    found = target.precision(precision, has_cache=False)
    return CompilePlan(config=config, target=target, precision=found, max_length=config.max_positions)


@pytest.fixture(params=sorted(CONFIGS))
def staged(request: pytest.FixtureRequest) -> Staged:
    return make_staged(CONFIGS[request.param])


@functools.cache
def make_staged(config: TransformerConfig) -> Staged:
    model = tiny_model(config)
    rows = parity_rows(config, None, max_length=config.max_positions, seed=1)
    graph = torch_to_onnx(Encoder(model, max_length=config.max_positions), encoder_signature(config))
    return Staged(model=model, rows=rows, eager=eager_states(model, rows), graph=graph)


def assert_close(found: States, eager: States, stage: str = "compiled", figure: str = "relative") -> None:
    difference = compare_states(eager, found)
    assert getattr(difference, figure) <= STATE_TOLERANCES[stage, figure], difference


def test_the_exported_graph_equals_eager(staged: Staged, tmp_path: Path) -> None:
    write_graph(staged.graph, tmp_path)
    assert_close(EncoderRunner(tmp_path / GRAPH_FILE).states(staged.rows), staged.eager, "exported")


def test_the_compiled_graph_equals_eager_in_batches_and_alone(staged: Staged, tmp_path: Path) -> None:
    runner = staged.compiled(tmp_path / "fp32", CPU, "fp32")
    whole = runner.states(staged.rows)
    assert_close(whole, staged.eager)
    # padding ids of any value, and more padding than the longest text needs
    assert_close(runner.states(staged.rows, pad_id=60, length=64), whole)
    for index in (0, 1, 3):
        (alone,) = runner.states([staged.rows[index]]).hidden
        assert_parity(alone, staged.eager.hidden[index], "compiled")
    shifted = [Row([*row.ids[1:], row.ids[0]], row.types) for row in staged.rows]
    with pytest.raises(AssertionError):
        assert_close(runner.states(shifted), staged.eager)


def test_b45_a_row_without_a_token_and_padding_give_finite_numbers(staged: Staged, tmp_path: Path) -> None:
    staged.compiled(tmp_path / "fp32", CPU, "fp32")
    session = onnxruntime.InferenceSession(tmp_path / "fp32" / GRAPH_FILE, providers=[CPU.provider])
    ids, lengths = np.full((3, 9), 5, np.int64), np.array([9, 2, 0], np.int32)
    feed = {"input_ids": ids, "lengths": lengths, "token_type_ids": np.zeros_like(ids)}
    names = {node.name for node in session.get_inputs()}
    for found in session.run(None, {name: array for name, array in feed.items() if name in names}):
        assert np.isfinite(found).all()


MASKS = {
    "right": np.arange(16) < np.array([[16], [9], [1], [12]]),
    "left": np.arange(16) >= np.array([[0], [7], [15], [4]]),
    "holes": np.random.default_rng(63).random((4, 16)) < 0.6,
    "all ones": np.ones((4, 16), bool),
}


@pytest.mark.parametrize("kind", MASKS)
def test_b63_a_mask_of_any_shape_gives_what_its_tokens_give_packed_to_the_left(kind: str, tmp_path: Path) -> None:
    """B63: the graph takes lengths, so the tokens that a mask keeps go in alone; eager takes the mask itself."""
    staged, mask = make_staged(CONFIGS["encoder_bert"]), MASKS[kind]
    ids = np.random.default_rng(64).integers(1, 60, size=mask.shape)
    with torch.inference_mode():
        eager = staged.model(torch.tensor(ids), padding=torch.tensor(mask)).numpy()
    rows = [Row(row[kept].tolist(), [0] * int(kept.sum())) for row, kept in zip(ids, mask, strict=True)]
    runner = staged.compiled(tmp_path / "fp32", CPU, "fp32", optimize=True)
    found = runner.states(rows, pad_id=7, length=16).hidden
    for states, wanted, kept in zip(found, eager, mask, strict=True):
        assert_parity(states, wanted[kept], "compiled")
    if kind in ("left", "holes"):  # a mask turned into a length reads the wrong tokens
        cut = [Row(row[: kept.sum()].tolist(), [0] * int(kept.sum())) for row, kept in zip(ids, mask, strict=True)]
        with pytest.raises(AssertionError):
            assert_parity(runner.states(cut).hidden[1], eager[1][mask[1]], "compiled")


def test_int8_equals_eager_with_the_weights_that_it_holds(staged: Staged, tmp_path: Path) -> None:
    found = staged.compiled(tmp_path / "int8", EXACT, "int8", optimize=True).states(staged.rows)
    rounded = copy.deepcopy(staged.model)
    tables = ("position.weight", "token_type.weight", "relative_bias.weight")  # looked up by Gather, in float32
    state = {
        name: torch.from_numpy(quantize_blocks(tensor.numpy(), 8).dequantize())
        if tensor.ndim == 2 and name not in tables
        else tensor
        for name, tensor in staged.model.state_dict().items()
    }
    rounded.load_state_dict(state)
    assert_close(found, eager_states(rounded, staged.rows))
    with pytest.raises(AssertionError):
        assert_close(found, staged.eager)


def test_a_bundle_for_cuda_computes_the_same_on_the_cpu(staged: Staged, tmp_path: Path) -> None:
    found = staged.compiled(tmp_path / "fp16", CUDA, "fp16", optimize=True).states(staged.rows)
    for wanted, got in zip(staged.eager.hidden, found.hidden, strict=True):
        assert_parity(got, wanted, "compiled", dtype="float16")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_that_computes_lands_on_cuda_and_lengths_are_the_mask(
    precision: str, tmp_path: Path, cuda: cuda_stubs.Placer
) -> None:
    staged = make_staged(CONFIGS["encoder_bert"])
    graph = staged.graph.clone()
    reports = compile_graph(graph, make_plan(staged.model.config, CUDA, precision))
    assert count_fusions(reports)["attention"] == count_fusions(reports)["packed_qkv"] == 2
    assert count_fusions(reports)["residual_norm"] == 5
    write_graph(graph, tmp_path)
    placement = cuda.place(tmp_path / GRAPH_FILE)
    assert set(placement.cpu) <= set(SHAPE_OPS)
    assert placement.cuda["MultiHeadAttention"] == 2
    assert placement.cuda["SkipLayerNormalization"] == 5
    kernels = [node for node in graph.graph if node.op_type == "MultiHeadAttention"]
    lengths = graph.graph.inputs[1]
    for kernel in kernels:
        assert kernel.inputs[4] is lengths
        assert list(lengths.shape or ()) == ["batch"]
        assert kernel.attributes["mask_filter_value"].as_float() < -1e38
    activations = CUDA.precision(precision, has_cache=False).activations
    assert {str(value.dtype.numpy()) for kernel in kernels if (value := kernel.inputs[0]) and value.dtype} == {
        activations
    }


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_every_kind_is_placed_on_cuda(kind: str, tmp_path: Path, cuda: cuda_stubs.Placer) -> None:
    staged = make_staged(CONFIGS[kind])
    staged.compiled(tmp_path / "fp16", CUDA, "fp16")
    placement = cuda.place(tmp_path / "fp16" / GRAPH_FILE)
    assert set(placement.cpu) <= set(SHAPE_OPS)
    takes = [CUDA.padded_limit(layer.attention) is None for layer in staged.model.config.blocks]
    assert placement.cuda.get("MultiHeadAttention", 0) == sum(takes)
    assert "GroupQueryAttention" not in placement.cuda


def _multi_head(**changes: Any) -> TransformerConfig:
    return decoder(
        block(of=attention(causal=False, num_kv_heads=6, **changes)), head="none", pooling=PoolingConfig(kind="max")
    )


@pytest.mark.parametrize(
    ("config", "target", "found"),
    [
        (CONFIGS["encoder_rotary_gated"], CUDA, "6 query heads share 2 key/value heads"),
        (_multi_head(softcap=5.0), CUDA, "scores are capped at 5"),
        (_multi_head(head_dim=20), CPU, "head_dim 20 is no multiple of 8"),
    ],
)
def test_what_no_kernel_takes_runs_as_standard_ops_and_is_said(
    config: TransformerConfig, target: Target, found: str, tmp_path: Path
) -> None:
    staged = make_staged(config)
    graph = staged.graph.clone()
    precision = "fp32" if target is CPU else "fp16"
    reports = compile_graph(graph, make_plan(config, target, precision))
    missed = [miss.found for report in reports if report.rule == "attention" for miss in report.missed]
    assert missed == [found, found]
    write_graph(graph, tmp_path)
    states = EncoderRunner(tmp_path / GRAPH_FILE, optimize=True).states(staged.rows)
    if target is CPU:
        assert_close(states, staged.eager)


@pytest.mark.parametrize(("target", "changes"), [(CPU, {"softcap": 5.0}), (CUDA, {})], ids=["cpu", "cuda"])
def test_rotations_and_caps_survive_in_float32(target: Target, changes: dict[str, Any], tmp_path: Path) -> None:
    staged = make_staged(_multi_head(**changes))
    assert_close(staged.compiled(tmp_path / "b", target, "fp32", optimize=True).states(staged.rows), staged.eager)


class _AllPools(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(pool(hidden, lengths, kind) for kind in POOLS)


def test_b129_b130_every_pooling_is_exported_and_reads_the_real_tokens_alone(tmp_path: Path) -> None:
    inputs = (
        TensorSpec(name="hidden", dtype="float32", shape=("batch", "sequence", 12)),
        TensorSpec(name="lengths", dtype="int32", shape=("batch",)),
    )
    outputs = tuple(TensorSpec(name=kind, dtype="float32", shape=("batch", 12)) for kind in POOLS)
    write_graph(torch_to_onnx(_AllPools(), Signature(inputs=inputs, outputs=outputs)), tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / GRAPH_FILE, providers=[CPU.provider])
    hidden, lengths = torch.randn(4, 7, 12), torch.tensor([7, 1, 4, 0], dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        hidden[row, length:] = float("nan")
    found = session.run(None, {"hidden": hidden.numpy(), "lengths": lengths.numpy()})
    for kind, pooled in zip(POOLS, found, strict=True):
        assert_parity(pooled, pool(hidden, lengths, kind), "attention", what=kind)


def _mask_off(graph: ir.Model) -> None:
    """Every row is as long as the longest."""
    node = next(node for node in graph.graph if node.op_type == "PaddedAttention")
    longest = ir.node("ReduceMax", [graph.graph.inputs[1]], {"keepdims": 1})
    lengths = ir.node("Max", [graph.graph.inputs[1], longest.outputs[0]])
    graph.graph.insert_before(next(iter(graph.graph)), [longest, lengths])
    node.replace_input_with(3, lengths.outputs[0])


def _position_later(graph: ir.Model) -> None:
    _roll(graph, "position.weight", 1)


def _heads_swapped(graph: ir.Model) -> None:
    _roll(graph, "blocks.0.attention.query.weight", 16)


def _roll(graph: ir.Model, name: str, rows: int) -> None:
    value = graph.graph.initializers[name]
    assert value.const_value is not None
    value.const_value = ir.tensor(np.roll(value.const_value.numpy(), -rows, axis=0), name=name)


@pytest.mark.parametrize("breaks", [_mask_off, _position_later, _heads_swapped])
def test_broken_graphs_are_rejected_and_leave_nothing(
    breaks: Callable[[ir.Model], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = make_staged(CONFIGS["encoder_bert"])
    broken = staged.graph.clone()
    breaks(broken)
    monkeypatch.setattr("graphport.export.model_export.torch_to_onnx", lambda *_: broken)
    with pytest.raises(ParityError, match="exported: 8 texts in one padded batch, relative"):
        export(staged.model, tmp_path / "out", precision="fp32")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_bundle_is_certified_and_verified_again(precision: str, tmp_path: Path) -> None:
    model = tiny_model(CONFIGS["encoder_bert"])
    bundle = export(model, tmp_path / "out", precision=precision)
    assert bundle.manifest.kind == "encoder"
    assert bundle.manifest.cache_dtype is None
    assert [check.name.split(":")[0] for check in bundle.certificate][:3] == ["exported", "compiled", "compiled"]
    assert all(check.passed for check in bundle.certificate)
    result = verify(bundle.path, device="cpu", threads=1)
    assert result.passed
    again = [check for check in result.checks if "relative against itself" in check.name]
    assert len(again) == 2 * len(bundle.manifest.signature.outputs)
    assert all(check.measured < 1e-6 for check in again)


def test_a_decoder_in_fp32_on_cuda_and_a_cache_for_an_encoder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="for decoders the CUDA provider has no float32 GroupQueryAttention"):
        export(tiny_model(decoder(block())), tmp_path / "out", target="cuda", precision="fp32")
    model = tiny_model(CONFIGS["encoder_bert"])
    with pytest.raises(TargetError, match="KV cache type 'int8': an encoder has no KV cache; leave --kv-cache out"):
        export(model, tmp_path / "out", kv_cache="int8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("broken", ["zeros", "another text", "one token", "nan"])
@pytest.mark.parametrize(("stage", "figure"), sorted(STATE_TOLERANCES))
@pytest.mark.parametrize("pools", [False, True])
def test_every_tolerance_rejects_wrong_states(stage: str, figure: str, broken: str, *, pools: bool) -> None:
    random = np.random.default_rng(0)
    hidden = [random.standard_normal((length, 8)).astype(np.float32) for length in (3, 3, 1)]
    vectors = [states.mean(0) for states in hidden] if pools else None
    reference = States(hidden, vectors)
    assert check_states(stage, figure, "it", compare_states(reference, reference)).passed
    wrong = [states.copy() for states in hidden]
    changed = None if vectors is None else [vector.copy() for vector in vectors]
    for states in (wrong[1], *(() if changed is None else (changed[1][None],))):
        if broken == "zeros":
            states[:] = 0
        elif broken == "another text":
            states[:] = -states
        else:
            states[-1:] = np.nan if broken == "nan" else states[-1:] + 5
    found = check_states(stage, figure, "it", compare_states(reference, States(wrong, changed)))
    assert not found.passed
    assert "1 - cosine" in found.detail
