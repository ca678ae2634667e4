"""Which graphs a provider of ONNX Runtime 1.31 cannot run, decided from their nodes before a session is opened.

In: a graph's header and the cache's type (None: no cache). Out: the reason in words, or None. Why it is decided here:
some kernels take a node and fail when it is run, some compute hundreds of times slower than they could, some move to
the CPU unnoticed.
"""

from graphport.model_def.signature import DType
from graphport.runtime.device import Device
from graphport.runtime.graph_file import GraphHeader, NodeHeader

_ATTENTION, _PRODUCT = "GroupQueryAttention", "MatMulNBits"
_QUERY_NORM, _KEY_NORM = 14, 15  # inputs of GroupQueryAttention

# Bits whose product has no fast CPU kernel for float activations: 14 ms against 0.03 ms for 1024 x 1024 weights of 8
# bits and one row, measured. accuracy_level 4 rounds the activations to 8 bits, for which there is one.
_SLOW_BITS = (2, 8)
_FLOAT_ACTIVATIONS, _INT8_ACTIVATIONS = 0, 4


def kernel_limit(header: GraphHeader, cache_dtype: DType | None, device: Device) -> str | None:
    """Why `device` cannot run the graph, or not at a useful speed; None when it can."""
    return _cuda_limit(header) if device == "cuda" else _cpu_limit(header, cache_dtype)


def _cuda_limit(header: GraphHeader) -> str | None:
    if header.float_type == "float32" and header.nodes_of(_ATTENTION):
        return f"it computes in float32, for which CUDA has no {_ATTENTION}: attention would run on the CPU"
    return None


def _cpu_limit(header: GraphHeader, cache_dtype: DType | None) -> str | None:
    if header.float_type == "bfloat16":
        return "it computes in bfloat16, for which the CPU has no kernels"
    if cache_dtype is not None and cache_dtype.startswith("float8"):
        return f"its KV cache is {cache_dtype}, which the CPU's {_ATTENTION} does not read"
    if any(node.has_input(_QUERY_NORM) or node.has_input(_KEY_NORM) for node in header.nodes_of(_ATTENTION)):
        return f"its {_ATTENTION} norms query and key heads itself, which only CUDA's does"
    products = header.nodes_of(_PRODUCT)
    if any(node.integers.get("weight_prepacked") for node in products):
        return "its weights lie in the order of a CUDA kernel, which the CPU would misread"
    asked = (_FLOAT_ACTIVATIONS, _INT8_ACTIVATIONS)
    slow = {node.integers["bits"] for node in products if node.integers.get("accuracy_level") not in asked}
    for bits in sorted(slow.intersection(_SLOW_BITS)):
        return f"its {bits}-bit products ask for float activations, hundreds of times slower on the CPU than 8-bit ones"
    return None


def slow_products(header: GraphHeader) -> str | None:
    """What makes the graph slow on the CPU because it was exported so, with exact activations; None if nothing does."""
    exact = [node for node in header.nodes_of(_PRODUCT) if node.integers.get("accuracy_level") == _FLOAT_ACTIVATIONS]
    bits = sorted({node.integers["bits"] for node in exact}.intersection(_SLOW_BITS))
    if not bits:
        return None
    widths = " and ".join(f"{each}-bit" for each in bits)
    return (
        f"its {widths} products take activations as they are (accuracy_level 0), hundreds of times slower than rounded"
    )


def float_products_limit(header: GraphHeader) -> str | None:
    """Why no product of the graph could have float32 activations on the CPU for rounded ones; None when one could."""
    rounded = {node.integers["bits"] for node in _rounding_products(header)}
    if not header.nodes_of(_PRODUCT):
        return "its matrices are not quantised, so its products are floats already"
    if not rounded:
        return "its products have activations as they are already (accuracy_level 0)"
    if rounded.issubset(_SLOW_BITS):
        bits = " and ".join(map(str, sorted(rounded)))
        return f"its matrices have {bits} bits, and the CPU's product with float activations is for 4"
    return None


def has_int8_activations(header: GraphHeader) -> bool:
    """Whether a product of the graph rounds its activations to 8 bits on the CPU."""
    return bool(_rounding_products(header))


def _rounding_products(header: GraphHeader) -> list[NodeHeader]:
    return [node for node in header.nodes_of(_PRODUCT) if node.integers.get("accuracy_level") == _INT8_ACTIVATIONS]
