"""One decoder graph on ONNX Runtime: opened, checked against its manifest, and run one step at a time.

In: a checked bundle, token ids and a KVCache. Out: logits of the rows asked for, with the cache appended in place.
It chooses no tokens, schedules nothing, and is not thread-safe. Legend: B rows, S new tokens a row, R logits rows.
"""

import logging
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import (
    INPUT_IDS,
    LOGITS,
    LOGITS_ROWS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    DType,
    Manifest,
    TensorSpec,
    decoder_signature,
    past_key,
    past_value,
    present_key,
    present_value,
)
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.cuda_device import device_memory
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.device import Device, DeviceError, DeviceRequest, DeviceWish, default_threads
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.limits import checked_count
from graphport.runtime.memory import cache_specs, free_memory
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.opening import open_graph

# Element type numbers of onnx.proto3 (TensorProto.DataType) and ONNX Runtime's names for them.
_ELEMENT_TYPES: dict[DType, int] = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "float16": 10,
    "bfloat16": 16,
}
_ORT_TYPES: dict[DType, str] = {
    **{name: f"tensor({name})" for name in _ELEMENT_TYPES},
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
    "Equal",
)

_THREADS_PER_PROCESSOR = 4  # at most

_log = logging.getLogger(__name__)


class Session:
    """An open decoder graph.

    Attributes: `device` and `device_id`, where it runs; `provider_options`, those that CUDA took; `memory_plan`, for
    runs within the limits given; `threads`; `vocab_size`; `placement`, number of nodes by (provider, op type).
    """

    def __init__(
        self,
        bundle: BundleFiles,
        *,
        device: DeviceWish = "auto",
        device_id: int = 0,
        provider_options: Mapping[str, OptionValue] | None = None,
        limits: RunLimits | None = None,
        threads: int | None = None,
    ) -> None:
        """`limits` are what memory is planned for: by default one row of the bundle's longest text, in one piece."""
        self.threads = default_threads() if threads is None else _checked_threads(threads)
        longest = bundle.manifest.max_length
        limits = limits or RunLimits(max_batch=1, max_length=longest, prefill_chunk=longest)
        request = DeviceRequest(wish=device, device_id=device_id, provider_options=provider_options)
        opened = open_graph(bundle, request, limits, threads=self.threads)
        self._session, self.device, self.device_id = opened.session, opened.device, opened.device_id
        self.provider_options, self.memory_plan = opened.provider_options, opened.plan
        self.manifest = bundle.manifest
        self.vocab_size = bundle.manifest.config.vocab_size
        self.placement = _placement(self._session)
        check_placement(self.placement, self.device)
        check_signature("input", bundle.manifest.signature.inputs, self._session.get_inputs())
        check_signature("output", bundle.manifest.signature.outputs, self._session.get_outputs())
        check_config(bundle.manifest)
        self._cache_names = [
            names
            for layer in range(bundle.manifest.config.num_layers)
            for names in ((past_key(layer), present_key(layer)), (past_value(layer), present_value(layer)))
        ]
        specs = {spec.name: spec for spec in cache_specs(bundle.manifest)}
        self.cache_specs = tuple(specs[past] for past, _ in self._cache_names)
        self._binding = self._session.io_binding()
        self._bound_rows: tuple[int, int, int] | None = None
        # Weak: the cache frees its old buffers while it grows. By reference, not by id(): ids are used again.
        self._bound_cache: tuple[weakref.ref[KVCache], int, int, int] | None = None
        self._total = np.zeros((), np.int32)
        self._ids = np.zeros(0, np.int64)
        self._seqlens = np.zeros(0, np.int32)
        self._rows = np.zeros(0, np.int64)
        self._logits = np.zeros((0, self.vocab_size), np.float32)

    def new_cache(self, *, max_slots: int, max_length: int) -> KVCache:
        """An empty cache for this graph on its device."""
        return KVCache(
            self.cache_specs,
            max_slots=max_slots,
            max_length=max_length,
            device=self.device,
            device_id=self.device_id,
            free=free_memory if self.device == "cpu" else self._free_on_cuda,
        )

    def step(
        self, cache: KVCache, ids: NDArray[np.int64], rows: NDArray[np.int64] | None = None, *, first_slot: int = 0
    ) -> NDArray[np.float32]:
        """Append `ids` [B, S] to slots first_slot .. first_slot+B-1 and return logits [R, vocab].

        `rows` [R] are indices into the flattened [B * S] positions; None asks for the last position of each row. Rows
        may differ in length when S is 1; several new tokens a row need B = 1 (GroupQueryAttention's rule). The result
        is a buffer that the next step overwrites. The slots must be active. If a step fails, their lengths stay.
        """
        batch, length = ids.shape
        if length > 1 and batch > 1:
            raise ValueError(f"a step of {length} tokens takes one row at a time, got {batch}")
        if not 0 <= first_slot <= first_slot + batch <= cache.num_active:
            raise ValueError(f"slots {first_slot} to {first_slot + batch - 1} are not active; {cache.num_active} are")
        num_rows = batch if rows is None else len(rows)
        after = cache.lengths[first_slot : first_slot + batch] + length
        total = int(after.max())
        cache.reserve(first_slot + batch, total)
        self._bind(cache, first_slot, batch, length, num_rows)
        self._ids[: batch * length] = ids.reshape(-1)
        np.subtract(after, 1, out=self._seqlens[:batch])
        self._total[()] = total
        self._rows[:num_rows] = np.arange(length - 1, batch * length, length) if rows is None else rows
        if self.device != "cpu":  # ONNX Runtime copies an input to the device when it is bound
            self._bind_inputs(batch, length, num_rows)
        self._session.run_with_iobinding(self._binding)
        cache.advance(first_slot, batch, length)
        return self._logits[:num_rows]

    def _free_on_cuda(self) -> int:
        return device_memory(self.device_id).free

    def _bind(self, cache: KVCache, first_slot: int, batch: int, length: int, num_rows: int) -> None:
        bound_rows = (batch, length, num_rows)
        if self._bound_rows != bound_rows:
            self._bound_rows = None
            self._grow_buffers(batch * length, batch, num_rows)
            self._bind_inputs(batch, length, num_rows)
            shape = (num_rows, self.vocab_size)
            self._binding.bind_output(LOGITS, "cpu", 0, _ELEMENT_TYPES["float32"], shape, self._logits.ctypes.data)
            self._bound_rows = bound_rows
        bound_cache = (weakref.ref(cache), cache.generation, first_slot, batch)
        if self._bound_cache != bound_cache:
            self._bound_cache = None
            self._bind_cache(cache, first_slot, batch)
            self._bound_cache = bound_cache

    def _grow_buffers(self, num_ids: int, batch: int, num_rows: int) -> None:
        if len(self._ids) < num_ids:
            self._ids = np.zeros(num_ids, np.int64)
        if len(self._seqlens) < batch:
            self._seqlens = np.zeros(batch, np.int32)
        if len(self._rows) < num_rows:
            self._rows = np.zeros(num_rows, np.int64)
            self._logits = np.zeros((num_rows, self.vocab_size), np.float32)

    def _bind_inputs(self, batch: int, length: int, num_rows: int) -> None:
        bind = self._binding.bind_input
        bind(INPUT_IDS, "cpu", 0, _ELEMENT_TYPES["int64"], (batch, length), self._ids.ctypes.data)
        bind(SEQLENS_K, "cpu", 0, _ELEMENT_TYPES["int32"], (batch,), self._seqlens.ctypes.data)
        bind(TOTAL_SEQUENCE_LENGTH, "cpu", 0, _ELEMENT_TYPES["int32"], (), self._total.ctypes.data)
        bind(LOGITS_ROWS, "cpu", 0, _ELEMENT_TYPES["int64"], (num_rows,), self._rows.ctypes.data)

    def _bind_cache(self, cache: KVCache, first_slot: int, batch: int) -> None:
        for (past, present), spec, buffer in zip(self._cache_names, cache.specs, cache.buffers, strict=True):
            shape = (batch, *buffer.shape[1:])
            place = (self.device, self.device_id, _ELEMENT_TYPES[spec.dtype], shape, buffer.address(first_slot))
            self._binding.bind_input(past, *place)
            self._binding.bind_output(present, *place)


def _checked_threads(threads: int) -> int:
    """Threads wait for one another in busy loops: more than the processors can hold never come to an end."""
    most = _THREADS_PER_PROCESSOR * (os.cpu_count() or 1)
    return checked_count("threads", threads, most=most, reason=f" ({_THREADS_PER_PROCESSOR} a processor)")


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
    found, expected = manifest.signature, decoder_signature(manifest.config, manifest.cache_dtype)
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


def _placement(session: Any) -> dict[tuple[str, str], int]:  # noqa: ANN401 - ORT is untyped
    nodes = Counter(
        (subgraph.ep_name or "CPUExecutionProvider", node.op_type)
        for subgraph in session.get_provider_graph_assignment_info()
        for node in subgraph.get_nodes()
    )
    _log.debug("node placement: %s", dict(nodes))
    return dict(nodes)
