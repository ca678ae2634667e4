"""Quantising the KV cache: its scales, what the pass makes of a graph, and what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_graphs import CONFIGS, change_attention, exported, make_plan
from tiny_models import HEAD_DIM, KV_HEADS, tiny_configs, tiny_model

from graphport.export.calibrate_cache import cache_scales, round_rows, search_scale
from graphport.export.float_prefill import IR_VERSION, OPSET
from graphport.export.graph_pass import CacheScales, CompilePlan
from graphport.export.model_export import export
from graphport.export.pipeline import compile_graph, count_fusions
from graphport.export.targets import CPU, CUDA, FP8_CACHE, INT4_CACHE, INT8_CACHE, CacheFormat, Target, TargetError
from graphport.export.torch_to_onnx import IR_VERSION as EXPORTED_IR_VERSION
from graphport.export.torch_to_onnx import OPSET as EXPORTED_OPSET
from graphport.model_def.block_config import AttentionConfig
from graphport.model_def.position_config import RotaryPosition
from graphport.model_def.signature import past_key, present_value

TINY = tiny_configs()
ONE = CacheScales(np.ones(1, np.float32), np.full(1, 2, np.float32))


def rows_of(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def plan_of(name: str, cache: CacheFormat | None, target: Target = CPU) -> CompilePlan:
    plan = make_plan(CONFIGS[name], "fp32" if target is CPU else "fp16", target=target)
    return dataclasses.replace(plan, cache=cache, cache_scales=(ONE,) * plan.config.num_layers if cache else ())


@pytest.mark.parametrize("cache", [INT8_CACHE, INT4_CACHE], ids=lambda cache: cache.name)
def test_a_scale_has_no_more_error_than_that_of_the_largest_value(cache: CacheFormat) -> None:
    rows = rows_of(1, KV_HEADS, 200, 16) ** 3  # long tails: clipping pays
    scale = search_scale(rows, cache)
    assert scale.shape == ((1, KV_HEADS, 1, 16) if cache.per_channel else (1,))
    assert scale.dtype == np.float32
    axes = (0, 2) if cache.per_channel else (0, 1, 2, 3)
    largest = np.abs(rows).max(axis=axes, keepdims=True) / cache.levels[1]
    errors = [np.square(round_rows(rows, s, cache) - rows).sum(axis=axes) for s in (scale, largest)]
    assert (errors[0] <= errors[1]).all()
    if cache.bits == 4:
        assert errors[0].sum() < 0.8 * errors[1].sum()


@pytest.mark.parametrize(("partial", "interleaved", "partner"), [(1.0, False, 8), (1.0, True, 1), (0.5, False, 4)])
def test_the_channels_of_a_rotary_pair_share_a_scale(partial: float, interleaved: bool, partner: int) -> None:
    rotary = RotaryPosition(theta=100.0, partial_factor=partial, interleaved=interleaved)
    config = change_attention(TINY["grouped_query"], rotary=rotary)
    width = int(partial * HEAD_DIM)
    caches = [rows_of(1, KV_HEADS, 50, HEAD_DIM, seed=seed) for seed in range(4)]
    caches[0][..., 0] *= 20  # a turn later its partner holds as much
    key, value = cache_scales(caches, config, INT4_CACHE)[0]
    for channel in range(HEAD_DIM):
        other = channel
        if channel < width:
            other = channel ^ 1 if interleaved else (channel + width // 2) % width
        assert (key[..., channel] == key[..., other]).all()
        assert (key[..., channel] > 5 * key.min()).all() == (channel in (0, partner))
    assert len(np.unique(value)) == value.size


def test_keys_that_do_not_turn_keep_a_scale_each() -> None:
    config = change_attention(TINY["grouped_query"], rotary=None)
    key, _ = cache_scales([rows_of(1, KV_HEADS, 50, HEAD_DIM, seed=s) for s in range(4)], config, INT4_CACHE)[0]
    assert len(np.unique(key)) == key.size


def test_channels_without_a_value_still_have_a_range() -> None:
    rows = rows_of(1, 2, 30, 4)
    rows[..., 1] = 0
    scale = search_scale(rows, INT4_CACHE)
    assert (scale[..., 1] >= 0.3 * 0.01 * np.abs(rows).max() / 7).all()
    assert (search_scale(np.zeros((1, 2, 30, 4), np.float32), INT8_CACHE) > 0).all()


def test_a_float8_scale_leaves_room_and_rounds_to_three_bits() -> None:
    rows = rows_of(1, 2, 300, 8)
    scale = search_scale(rows, FP8_CACHE)
    assert scale == pytest.approx(2 * np.abs(rows).max() / 448)
    rounded = round_rows(rows, scale, FP8_CACHE)
    large = np.abs(rows) > 0.01
    assert np.abs(rounded / rows - 1)[large].max() <= 2**-4
    assert round_rows(np.float32([1e9]), np.float32([1]), FP8_CACHE) == 448  # clipped, not NaN


def test_a_cache_that_is_not_finite_is_refused_with_the_layer() -> None:
    caches = [rows_of(1, KV_HEADS, 5, HEAD_DIM) for _ in range(4)]
    caches[3][0, 0, 2, 1] = np.inf
    with pytest.raises(TargetError, match="layer 1 caches values that are not finite on the calibration text"):
        cache_scales(caches, TINY["grouped_query"], INT8_CACHE)


@pytest.mark.parametrize("cache", [INT8_CACHE, INT4_CACHE], ids=lambda cache: cache.name)
@pytest.mark.parametrize("name", ["llama", "gemma", "post"])
def test_every_attention_gets_a_quantised_cache_and_a_float_way_for_long_steps(name: str, cache: CacheFormat) -> None:
    model, plan = exported(name), plan_of(name, cache)
    reports = compile_graph(model, plan)
    layers = plan.config.num_layers
    assert count_fusions(reports)["kv_cache"] == layers
    choices = [node for node in model.graph if node.op_type == "If"]
    assert len(choices) == layers
    for choice in choices:
        ways = [choice.attributes[key].as_graph() for key in ("then_branch", "else_branch")]
        kernels = [[n for n in way if n.op_type == "GroupQueryAttention"] for way in ways]
        assert [len(found) for found in kernels] == [1, 1]
        float_kernel, quantised = kernels[0][0], kernels[1][0]
        assert "k_quant_type" not in float_kernel.attributes
        assert quantised.attributes["kv_cache_bit_width"].as_int() == cache.bits
        same = set(float_kernel.attributes) & set(quantised.attributes)
        assert "scale" in same
        assert all(float_kernel.attributes[key].value == quantised.attributes[key].value for key in same)
    assert not [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    head_dim = plan.config.blocks[0].attention.head_dim
    for value in [*model.graph.inputs, *model.graph.outputs]:
        if value.name in (past_key(0), present_value(layers - 1)):
            assert value.dtype == (ir.DataType.INT8 if cache.bits == 8 else ir.DataType.UINT8)
            assert value.shape is not None
            assert value.shape[3] == head_dim * cache.bits // 8
    assert (model.graph.opset_imports[""], model.ir_version) == (OPSET, IR_VERSION)


def test_a_plan_without_a_cache_format_leaves_the_graph_alone() -> None:
    model, plan = exported("llama"), plan_of("llama", None)
    assert count_fusions(compile_graph(model, plan))["kv_cache"] == 0
    assert (model.graph.opset_imports[""], model.ir_version) == (EXPORTED_OPSET, EXPORTED_IR_VERSION)


@pytest.mark.parametrize("cache", CUDA.caches, ids=lambda cache: cache.name)
def test_cuda_reads_it_in_one_kernel_with_float32_scales(cache: CacheFormat) -> None:
    model, plan = exported("llama"), plan_of("llama", cache, target=CUDA)
    compile_graph(model, plan)
    kernels = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert len(kernels) == plan.config.num_layers
    for kernel in kernels:
        scales = kernel.inputs[12:14]
        assert [s.const_value.numpy().tolist() for s in scales if s is not None and s.const_value is not None] == [
            [1.0],
            [2.0],
        ]
        assert all(s is not None and s.dtype == ir.DataType.FLOAT for s in scales)
        assert kernel.attributes["k_quant_type"].as_string() == "PER_TENSOR"
    assert not [node for node in model.graph if node.op_type == "If"]


def test_a_head_size_that_runs_as_standard_ops_cannot_have_one(tmp_path: Path) -> None:
    reason = r"KV cache type 'int8': layer 0: head_dim 20 is no multiple of 8.*float cache; choose --kv-cache auto"
    with pytest.raises(TargetError, match=reason):
        export(tiny_model(TINY["head_dim_20"]), tmp_path / "bundle", kv_cache="int8")
    assert not list(tmp_path.iterdir())


def test_cuda_reads_no_quantised_cache_of_larger_heads() -> None:
    large = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=264)
    assert CUDA.cache_limit(large) == "no kernel of target cuda reads a quantised cache with head_dim above 256"
    assert CPU.cache_limit(large) is None
