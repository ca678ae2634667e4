"""What of a bundle decides its memory on a device, read from its manifest and its graph's header.

In: a checked bundle and a device. Out: `ModelSizes` for `memory_plan.py`. It reads no weights and plans nothing.
"""

from graphport.model_def.signature import source_specs
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.cache_sizes import cache_sizes
from graphport.runtime.device import Device
from graphport.runtime.graph_file import GraphHeader, NodeHeader
from graphport.runtime.memory import cache_specs
from graphport.runtime.memory_plan import ModelSizes
from graphport.runtime.source_rows import source_bytes_per_token

_ATTENTIONS, _PRODUCT = ("GroupQueryAttention", "MultiHeadAttention"), "MatMulNBits"

# The compact GEMM of MatMulNBits on CUDA times its variants on products of this many rows when a session is opened.
_TIMED_ROWS = 2048


def model_sizes(
    bundle: BundleFiles, device: Device, *, compact_gemm: bool = False, float_products: bool = False
) -> ModelSizes:
    """The sizes of `bundle` on `device`. `compact_gemm`: whether CUDA's MatMulNBits orders weights for its own GEMM.

    `float_products`: whether a second session runs prompts.
    """
    header = bundle.header
    blocks = {name for node in header.nodes_of(_PRODUCT) for name in node.inputs[1:3]}
    return ModelSizes(
        config=bundle.manifest.config,
        device=device,
        weights=bundle.weights_bytes + (0 if bundle.encoder is None else bundle.encoder.weights_bytes),
        blocks=_num_bytes(header, blocks),
        float_type=header.float_type,
        cache_dtype=bundle.manifest.cache_dtype or header.float_type,
        cache=cache_sizes(cache_specs(bundle.manifest), bundle.manifest.window_rows),
        fused_attention=sum(len(header.nodes_of(op)) for op in _ATTENTIONS) >= bundle.manifest.config.num_layers,
        source_bytes=_source_bytes(bundle),
        samples=bundle.manifest.samples_on_device,
        repacked=_num_bytes(header, blocks & _read_elsewhere(header)) if compact_gemm else 0,
        timing=max(map(_timing_bytes, header.nodes_of(_PRODUCT)), default=0) if compact_gemm else 0,
        float_products=float_products,
    )


def _source_bytes(bundle: BundleFiles) -> int:
    """Bytes of the longest source of one row."""
    if bundle.encoder is None:
        return 0
    specs = source_specs(bundle.manifest.config, bundle.manifest.cache_dtype or "float32")
    return source_bytes_per_token(specs) * bundle.encoder.manifest.max_length


def _num_bytes(header: GraphHeader, names: set[str]) -> int:
    return sum(header.tensors[name].num_bytes for name in names if name in header.tensors)


def _read_elsewhere(header: GraphHeader) -> set[str]:
    """Tensors that something besides MatMulNBits reads: they stay beside the ordered copy."""
    return {name for node in header.nodes if node.op_type != _PRODUCT for name in node.inputs}


def _timing_bytes(node: NodeHeader) -> int:
    """What timing one matrix takes: float16 factors and product, weights, scales twice, 58 bytes a row of weights.

    As the provider of ONNX Runtime 1.31.1 asks for it, for seven shapes from 576 x 49152 to 2048 x 128256, to the byte.
    """
    width, rows, bits = (node.integers[name] for name in ("K", "N", "bits"))
    return 2 * _TIMED_ROWS * (rows + width) + width * rows * bits // 8 + width * rows // 8 + 58 * rows
