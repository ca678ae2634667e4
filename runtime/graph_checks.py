"""Whether an open graph is the one that its manifest describes, and where its nodes run.

In: a manifest, ONNX Runtime's inputs, outputs and placement. Out: nothing, or an error that names what differs. It
opens and runs nothing.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from graphport.model_def.signature import DType, Manifest, TensorSpec, decoder_signature
from graphport.runtime.device import Device, DeviceError
from graphport.runtime.step_tensors import ELEMENT_TYPES

_ORT_TYPES: dict[DType, str] = {
    **{name: f"tensor({name})" for name in ELEMENT_TYPES},
    "float32": "tensor(float)",
}

# Ops that ONNX Runtime may keep on the CPU under CUDA because they compute shapes and lengths only. All have CUDA
# kernels for every float type, so one that works on activations never lands here for want of a kernel. Gather is not
# among them: it may be the embedding.
SHAPE_OPS = (
    "Shape",
    "Size",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Concat",
    "Slice",
    "Cast",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Equal",
)

_log = logging.getLogger(__name__)


def check_signature(what: str, specs: Sequence[TensorSpec], nodes: Sequence[Any]) -> None:
    """Compare a graph's inputs or outputs (ONNX Runtime NodeArgs) with the manifest's; raises ValueError by name."""
    found = {node.name: node for node in nodes}
    expected = {spec.name: spec for spec in specs}
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing or extra:
        raise ValueError(
            f"the graph's {what}s differ from the manifest: missing {', '.join(missing) or 'none'}, "
            f"not expected {', '.join(extra) or 'none'}; export the bundle again"
        )
    for name, spec in expected.items():
        node = found[name]
        same_rank = len(node.shape) == len(spec.shape)
        fixed = zip(spec.shape, node.shape, strict=True) if same_rank else ()
        agrees = all(not isinstance(want, int) or not isinstance(got, int) or want == got for want, got in fixed)
        if node.type != _ORT_TYPES[spec.dtype] or not same_rank or not agrees:
            raise ValueError(
                f"graph {what} {name} is {node.type} {list(node.shape)}, the manifest says {spec.dtype} "
                f"{list(spec.shape)}; export the bundle again"
            )


def check_config(manifest: Manifest) -> None:
    """Raise ValueError when the manifest's configuration is not that of its signature, and so of its graph."""
    found = manifest.signature
    dtype = manifest.cache_dtype
    if dtype is None:
        raise ValueError("the manifest's signature has no KV cache, which a decoder needs; export the bundle again")
    layers = manifest.window_layers
    expected = decoder_signature(manifest.config, dtype, samples=manifest.samples_on_device, window_layers=layers)
    for layer in layers:
        if manifest.config.blocks[layer].attention.window is None:
            raise ValueError(
                f"the manifest keeps a window of layer {layer}, whose configuration has none; export the bundle again"
            )
    pairs = zip_longest((*found.inputs, *found.outputs), (*expected.inputs, *expected.outputs))
    for spec, wanted in pairs:
        if spec != wanted:
            raise ValueError(
                f"the manifest's configuration does not fit its graph: it needs {wanted}, the graph has {spec}; "
                "export the bundle again"
            )


def check_placement(placement: Mapping[tuple[str, str], int], device: Device) -> None:
    """Raise DeviceError when a node that computes runs on the CPU although the device is another."""
    if device == "cpu":
        return
    stray = {
        op: count
        for (provider, op), count in placement.items()
        if provider == "CPUExecutionProvider" and op not in SHAPE_OPS
    }
    if stray:
        named = ", ".join(f"{count} x {op}" for op, count in sorted(stray.items()))
        raise DeviceError(
            f"device {device} was chosen, but {named} would run on the CPU; export the bundle with target {device}, "
            "or use device='cpu'"
        )


def node_placement(session: Any) -> dict[tuple[str, str], int]:  # noqa: ANN401 - ORT is untyped
    """Number of nodes of an open session by (provider, op type)."""
    nodes = Counter(
        (subgraph.ep_name or "CPUExecutionProvider", node.op_type)
        for subgraph in session.get_provider_graph_assignment_info()
        for node in subgraph.get_nodes()
    )
    _log.debug("node placement: %s", dict(nodes))
    return dict(nodes)
