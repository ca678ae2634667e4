"""What the kernels of a provider cannot run is said before a session is opened, and only that."""

from typing import Any, cast

import pytest

from graphport.model_def.signature import DType
from graphport.runtime.graph_file import GraphHeader, NodeHeader, TensorHeader
from graphport.runtime.kernel_limits import kernel_limit, slow_products

FLOAT32, FLOAT16, BFLOAT16 = 1, 10, 16


def header(*nodes: NodeHeader, element_type: int = FLOAT16) -> GraphHeader:
    tensors = {
        "w": TensorHeader(element_type=element_type, num_bytes=8),
        "t": TensorHeader(element_type=7, num_bytes=8),
    }
    return GraphHeader(ir_version=10, opsets={"": 23}, external=(), nodes=nodes, tensors=tensors)


def attention(*norms: str) -> NodeHeader:
    inputs = ("qkv", "", "", "k", "v", "seqlens_k", "total", "cos", "sin", "", "", "", "", "", *norms)
    return NodeHeader(op_type="GroupQueryAttention", domain="com.microsoft", inputs=inputs, integers={"num_heads": 4})


def product(**integers: int) -> NodeHeader:
    inputs = ("x", "w_q", "w_scales")
    return NodeHeader(op_type="MatMulNBits", domain="com.microsoft", inputs=inputs, integers={"K": 32, **integers})


@pytest.mark.parametrize(
    ("graph", "cache", "match"),
    [
        (header(attention(), element_type=BFLOAT16), "bfloat16", "bfloat16, for which the CPU has no kernels"),
        (header(attention("q", "k")), "float16", "norms query and key heads itself, which only CUDA's does"),
        (header(attention("", "k")), "float16", "norms query and key heads itself"),
        (header(product(bits=8)), "float16", "8-bit products ask for float activations, hundreds of times slower"),
        (header(product(bits=8, accuracy_level=1)), "float16", "8-bit products ask for float activations"),
        (header(product(bits=4), product(bits=2)), "float16", "2-bit products ask for float activations"),
        (header(product(bits=4, weight_prepacked=1)), "float16", "order of a CUDA kernel, which the CPU would misread"),
        (header(attention()), "float8e4m3fn", "KV cache is float8e4m3fn, which the CPU's GroupQueryAttention does not"),
    ],
)
def test_what_the_cpu_cannot_run_has_a_reason(graph: GraphHeader, cache: Any, match: str) -> None:
    limit = kernel_limit(graph, cast(DType, cache), "cpu")
    assert limit is not None
    assert match in limit
    assert kernel_limit(graph, cast(DType, cache), "cuda") is None


@pytest.mark.parametrize(
    "graph",
    [
        header(attention()),
        header(attention("", "")),
        header(attention(), element_type=FLOAT32),
        header(attention(), product(bits=8, accuracy_level=4), product(bits=4), product(bits=4, weight_prepacked=0)),
    ],
)
def test_what_the_cpu_runs_has_none(graph: GraphHeader) -> None:
    assert kernel_limit(graph, "int8", "cpu") is None


def test_float32_attention_would_leave_cuda_for_the_cpu() -> None:
    limit = kernel_limit(header(attention(), element_type=FLOAT32), "float32", "cuda")
    assert limit == (
        "it computes in float32, for which CUDA has no GroupQueryAttention: attention would run on the CPU"
    )
    assert kernel_limit(header(element_type=FLOAT32), "float32", "cuda") is None


def test_what_was_exported_with_exact_activations_runs_and_is_called_slow() -> None:
    exact = header(product(bits=8, accuracy_level=0), product(bits=4, accuracy_level=0))
    assert kernel_limit(exact, "float32", "cpu") is None
    assert slow_products(exact) == (
        "its 8-bit products take activations as they are (accuracy_level 0), hundreds of times slower than rounded"
    )
    assert slow_products(header(product(bits=8, accuracy_level=4), product(bits=4, accuracy_level=0))) is None
