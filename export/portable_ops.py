# ruff: noqa: N802  # a function's name here is the name of the ONNX op
"""The `graphport` ops as ONNX functions made of standard ops (opset 23), so that an exported graph runs anywhere.

In: the op's inputs and attributes. Out: the op's outputs, equal to `model_def/ops.py`. Each function is onnxscript:
Python syntax that becomes a FunctionProto; nothing here runs as Python (see `function_bodies.py`).

Shapes: `B` rows, `S` new tokens, `N` query heads, `K` key/value heads, `G` = N/K, `H` head size, `C` cache capacity.
"""

from onnxscript import FLOAT, INT32, INT64, script
from onnxscript import opset23 as op
from onnxscript.values import Opset

DOMAIN = "graphport"
GRAPHPORT = Opset(DOMAIN, 1)


@script(GRAPHPORT, default_opset=op)
def RMSNorm(x: FLOAT, weight: FLOAT, epsilon: float) -> FLOAT:
    """x / sqrt(mean(x^2) + epsilon) * weight, statistics in float32."""
    wide = op.Cast(x, to=1)
    mean_square = op.ReduceMean(wide * wide, op.Constant(value_ints=[-1]), keepdims=1)
    normal = wide / op.Sqrt(mean_square + epsilon)
    return op.CastLike(normal * op.Cast(weight, to=1), x)


@script(GRAPHPORT, default_opset=op)
def Linear(x: FLOAT, weight: FLOAT) -> FLOAT:
    """X W^T for x [..., W_in] and weight [W_out, W_in], the layout of torch.nn.Linear.

    Gemm reads the weight as it lies; a Transpose before a MatMul would be made anew at every run.
    """
    rows = op.Reshape(x, op.Concat([-1], op.Shape(weight, start=1), axis=0))
    product = op.Gemm(rows, weight, transB=1)
    shape = op.Concat(op.Shape(x, end=-1), op.Shape(weight, end=1), axis=0)
    return op.Reshape(product, shape, allowzero=1)


@script(GRAPHPORT, default_opset=op)
def Rotate(heads: FLOAT, cos: FLOAT, sin: FLOAT, rotary_interleaved: int) -> FLOAT:
    """Rotate the first 2 * Shape(cos)[-1] dimensions of heads [B, N, S, H] by tables [B, 1, S, D/2]."""
    last = op.Constant(value_ints=[-1])
    half = op.Shape(cos, start=-1)
    dim = half + half
    turning = op.Slice(heads, [0], dim, last)
    passing = op.Slice(heads, dim, op.Constant(value_ints=[9223372036854775807]), last)
    low = op.Slice(turning, [0], half, last)
    high = op.Slice(turning, half, dim, last)
    by_halves = op.Concat(low * cos - high * sin, high * cos + low * sin, axis=-1)
    even = op.Slice(turning, [0], dim, last, [2])
    odd = op.Slice(turning, [1], dim, last, [2])
    turned_even = op.Unsqueeze(even * cos - odd * sin, last)
    turned_odd = op.Unsqueeze(odd * cos + even * sin, last)
    by_pairs = op.Reshape(op.Concat(turned_even, turned_odd, axis=-1), op.Shape(turning))
    is_interleaved = op.Cast(op.Constant(value_int=rotary_interleaved), to=9)
    return op.Concat(op.Where(is_interleaved, by_pairs, by_halves), passing, axis=-1)


@script(GRAPHPORT, default_opset=op)
def SplitHeads(x: FLOAT, heads: int) -> FLOAT:
    """[B, S, N*H] to [B, N, S, H]."""
    count = op.Unsqueeze(op.Constant(value_int=heads), [0])
    shape = op.Concat([0], [0], count, [-1], axis=0)
    return op.Transpose(op.Reshape(x, shape), perm=[0, 2, 1, 3])


@script(GRAPHPORT, default_opset=op)
def PastLengths(seqlens_k: INT32, num_new: INT64) -> INT64:
    """Tokens cached before the step [B]: seqlens_k + 1 - num_new, or 0 in a row that is padded to num_new.

    A Range turns the size into a tensor on the device: a copy from the host would forbid capture as a CUDA graph.
    """
    before = op.Cast(seqlens_k, to=7) + op.Range(1 - num_new, 2 - num_new, 1)
    return op.Max(before, op.CastLike(0, before))


@script(GRAPHPORT, default_opset=op)
def WriteCache(cache: FLOAT, new: FLOAT, past: INT64) -> FLOAT:
    """The cache [B, K, C, H] with `new` [B, K, S, H] at positions past .. past + S."""
    num_new = op.Squeeze(op.Shape(new, start=2, end=3))
    capacity = op.Squeeze(op.Shape(cache, start=2, end=3))
    source = op.Range(0, capacity, 1) - op.Unsqueeze(past, [1])
    last = op.Range(num_new - 1, num_new, 1)  # on the device, see PastLengths
    fresh = op.And(source >= 0, source <= last)
    clipped = op.Min(op.Max(source, op.CastLike(0, source)), last)
    index = op.Expand(op.Unsqueeze(clipped, [1, 3]), op.Shape(cache))
    return op.Where(op.Unsqueeze(fresh, [1, 3]), op.GatherElements(new, index, axis=2), cache)


@script(GRAPHPORT, default_opset=op)
def Attend(
    queries: FLOAT,
    keys: FLOAT,
    values: FLOAT,
    positions: INT64,
    scale: float,
    softcap: float,
    local_window_size: int,
) -> FLOAT:
    """Queries [B, N, S, H] at `positions` [B, S] over caches [B, K, C, H]; returns [B, S, N*H]."""
    num_new = op.Shape(queries, start=2, end=3)
    kv_heads = op.Shape(keys, start=1, end=2)
    column = op.Range(0, op.Squeeze(op.Shape(keys, start=2, end=3)), 1)
    row = op.Unsqueeze(positions, [2])
    window = op.Constant(value_int=local_window_size)
    in_window = op.Or(window <= 0, column > row - window)
    visible = op.Unsqueeze(op.And(column <= row, in_window), [1, 2])
    # what lies beyond the text may be anything, NaN included: it must not reach a product with weight 0
    written = op.Unsqueeze(column <= op.ReduceMax(positions, [1], keepdims=1), [1, 3])
    clean_keys = op.Unsqueeze(op.Where(written, keys, op.CastLike(0.0, keys)), [2])
    clean_values = op.Unsqueeze(op.Where(written, values, op.CastLike(0.0, values)), [2])
    grouped = op.Reshape(queries, op.Concat([0], kv_heads, [-1], num_new, op.Shape(queries, start=3), axis=0))
    scores = op.Cast(op.MatMul(grouped, op.Transpose(clean_keys, perm=[0, 1, 2, 4, 3])), to=1) * scale
    cap = op.Constant(value_float=softcap)
    safe_cap = op.Where(cap > 0.0, cap, 1.0)
    capped = op.Where(cap > 0.0, safe_cap * op.Tanh(scores / safe_cap), scores)
    masked = op.Where(visible, capped, op.Constant(value_float=float("-inf")))
    attended = op.MatMul(op.CastLike(op.Softmax(masked, axis=-1), values), clean_values)  # [B, K, G, S, H]
    joined = op.Transpose(op.Reshape(attended, op.Shape(queries)), perm=[0, 2, 1, 3])
    return op.Reshape(joined, [0, 0, -1])


@script(GRAPHPORT, default_opset=op)
def CachedAttention(
    query: FLOAT,
    key: FLOAT,
    value: FLOAT,
    past_key: FLOAT,
    past_value: FLOAT,
    seqlens_k: INT32,
    total_sequence_length: INT32,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    softcap: float,
    local_window_size: int,
) -> tuple[FLOAT, FLOAT, FLOAT]:
    """Write new keys and values into the cache, attend over it; see `model_def.ops.cached_attention`."""
    num_new = op.Squeeze(op.Shape(query, start=1, end=2))
    past = PastLengths(seqlens_k, num_new)
    positions = op.Unsqueeze(past, [1]) + op.Range(0, num_new, 1)
    present_key = WriteCache(past_key, SplitHeads(key, heads=kv_num_heads), past)
    present_value = WriteCache(past_value, SplitHeads(value, heads=kv_num_heads), past)
    queries = SplitHeads(query, heads=num_heads)
    output = Attend(
        queries,
        present_key,
        present_value,
        positions,
        scale=scale,
        softcap=softcap,
        local_window_size=local_window_size,
    )
    return output, present_key, present_value


@script(GRAPHPORT, default_opset=op)
def RotaryCachedAttention(
    query: FLOAT,
    key: FLOAT,
    value: FLOAT,
    past_key: FLOAT,
    past_value: FLOAT,
    seqlens_k: INT32,
    total_sequence_length: INT32,
    cos: FLOAT,
    sin: FLOAT,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
    softcap: float,
    local_window_size: int,
    rotary_interleaved: int,
) -> tuple[FLOAT, FLOAT, FLOAT]:
    """CachedAttention with queries and keys rotated by tables [P, D/2] first."""
    num_new = op.Squeeze(op.Shape(query, start=1, end=2))
    past = PastLengths(seqlens_k, num_new)
    positions = op.Unsqueeze(past, [1]) + op.Range(0, num_new, 1)
    cos_rows = op.Unsqueeze(op.Gather(cos, positions), [1])
    sin_rows = op.Unsqueeze(op.Gather(sin, positions), [1])
    queries = Rotate(SplitHeads(query, heads=num_heads), cos_rows, sin_rows, rotary_interleaved=rotary_interleaved)
    keys = Rotate(SplitHeads(key, heads=kv_num_heads), cos_rows, sin_rows, rotary_interleaved=rotary_interleaved)
    present_key = WriteCache(past_key, keys, past)
    present_value = WriteCache(past_value, SplitHeads(value, heads=kv_num_heads), past)
    output = Attend(
        queries,
        present_key,
        present_value,
        positions,
        scale=scale,
        softcap=softcap,
        local_window_size=local_window_size,
    )
    return output, present_key, present_value


@script(GRAPHPORT, default_opset=op)
def Positions(query: FLOAT, seqlens_k: INT32) -> INT64:
    """Positions [B, S] of the new tokens whose queries are `query` [B, S, W]."""
    num_new = op.Squeeze(op.Shape(query, start=1, end=2))
    past = PastLengths(seqlens_k, num_new)
    return op.Unsqueeze(past, [1]) + op.Range(0, num_new, 1)


FUNCTIONS = (
    RMSNorm,
    Linear,
    CachedAttention,
    RotaryCachedAttention,
    Positions,
    Rotate,
    SplitHeads,
    PastLengths,
    WriteCache,
    Attend,
)
