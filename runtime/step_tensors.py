"""Inputs and outputs of one kind of step, where the session computes: bound once, moved no more than needed.

In: what a step asks for, and a cache. Out: a binding to run, and the outputs of the run. It runs nothing and chooses no
tokens (see `session.py`). B: rows; S: new tokens a row; R: rows of logits.
"""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import (
    GREEDY_IDS,
    INPUT_IDS,
    LOGITS,
    LOGITS_ROWS,
    NEXT_SEQLENS_K,
    SEQLENS_K,
    SOURCE_LENGTHS,
    TOTAL_SEQUENCE_LENGTH,
    WINDOW_SEQLENS_K,
    WINDOW_TOTAL_SEQUENCE_LENGTH,
    DType,
    Manifest,
    TensorSpec,
    past_key,
    past_value,
    present_key,
    present_value,
    sample_outputs,
)
from graphport.runtime.device_memory import DeviceMemory, DeviceTensor
from graphport.runtime.dlpack import DeviceIds
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.step_outputs import StepOutputs

# Element type numbers of onnx.proto3 (TensorProto.DataType).
ELEMENT_TYPES: dict[DType, int] = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "int32": 6,
    "int64": 7,
    "float16": 10,
    "bfloat16": 16,
    "float8e4m3fn": 17,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a step: `batch` rows of `length` new tokens, `num_rows` rows of logits."""

    batch: int
    length: int
    num_rows: int

    def covers(self, other: "StepShape") -> bool:
        """Whether tensors made for this shape have room for the other."""
        ids, other_ids = self.batch * self.length, other.batch * other.length
        return ids >= other_ids and self.batch >= other.batch and self.num_rows >= other.num_rows


class StepTensors:
    """Tensors with room for a shape, and a binding of the part that a step needs. Addresses never change."""

    def __init__(self, session: Any, memory: DeviceMemory, manifest: Manifest, room: StepShape) -> None:  # noqa: ANN401 - ORT is untyped
        self.room = room
        self._memory = memory
        self._binding = session.io_binding()
        self._ids = _Input(memory, room.batch * room.length, "int64")
        self._seqlens = _Input(memory, room.batch, "int32")
        self._rows = _Input(memory, room.num_rows, "int64")
        self._sources = None if manifest.config.encoder is None else _Input(memory, room.batch, "int32")
        self._total = np.zeros((), np.int32)  # read on the host
        has_windows = bool(manifest.window_layers)
        self._window_seqlens = _Input(memory, room.batch, "int32") if has_windows else None
        self._window_total = np.zeros((), np.int32)
        self._vocab_size = manifest.config.vocab_size
        self._logits = memory.tensor((room.num_rows, self._vocab_size), "float32")
        specs = sample_outputs(manifest.config) if manifest.samples_on_device else ()
        self._samples = {spec.name: memory.tensor(_sizes(spec, room), spec.dtype) for spec in specs}
        self._cache_names = [
            names
            for layer in range(manifest.config.num_layers)
            for names in ((past_key(layer), present_key(layer)), (past_value(layer), present_value(layer)))
        ]
        self._bound_shape: StepShape | None = None
        self._bound_total: int | None = None
        # Weak: the cache frees its old buffers while it grows. By reference, not by id(): ids are used again.
        self._bound_cache: tuple[weakref.ref[KVCache], int, int, int, int] | None = None
        self._addresses: tuple[int, ...] = ()
        memory.synchronize()  # the inputs' first contents are there

    @property
    def has_samples(self) -> bool:
        """Whether the graph reduces its logits."""
        return bool(self._samples)

    def write(
        self,
        ids: NDArray[np.int64] | DeviceIds,
        seqlens: NDArray[np.int32],
        rows: NDArray[np.int64],
        *,
        total: int,
        held: NDArray[np.int32],
    ) -> None:
        """Set the inputs: `ids` [B * S], `seqlens` [B], `rows` [R]. What is there already is not moved again.

        `held` [B]: tokens after the step in layers with a window, where these count apart.
        """
        if isinstance(ids, DeviceIds):
            self._ids.take(ids)
        else:
            self._ids.write(ids)
        self._seqlens.write(seqlens)
        self._rows.write(rows)
        self._total[()] = total
        if self._window_seqlens is not None:
            self._window_seqlens.write(held - 1)
            self._window_total[()] = held.max()

    def bind(self, cache: KVCache, first_slot: int, shape: StepShape) -> Any:  # noqa: ANN401 - ORT is untyped
        """ONNX Runtime's binding of a step that `write` has prepared; what is bound already stays."""
        if self._bound_shape != shape:
            self._bound_shape = None
            self._bind_step(shape)
            self._bound_shape = shape
        # What lies on the host is read there when the step runs; ONNX Runtime would copy it to a device when bound.
        if self._bound_total is None or (self._memory.device != "cpu" and self._bound_total != int(self._total)):
            self._binding.bind_input(
                TOTAL_SEQUENCE_LENGTH, "cpu", 0, ELEMENT_TYPES["int32"], (), self._total.ctypes.data
            )
            if self._window_seqlens is not None:
                self._binding.bind_input(
                    WINDOW_TOTAL_SEQUENCE_LENGTH, "cpu", 0, ELEMENT_TYPES["int32"], (), self._window_total.ctypes.data
                )
            self._bound_total = int(self._total)
        moves = 0 if cache.source is None else cache.source.generation
        bound_cache = (weakref.ref(cache), cache.generation, first_slot, shape.batch, moves)
        if self._bound_cache != bound_cache:
            self._bound_cache = None
            self._bind_cache(cache, first_slot, shape.batch)
            self._bound_cache = bound_cache
        if self._sources is not None and cache.source is not None:
            self._sources.write(cache.source.lengths[first_slot : first_slot + shape.batch])
        return self._binding

    def bound_to(self) -> Hashable:
        """What a captured graph of the step that is bound holds for good."""
        return self._bound_shape, self._bound_total, self._addresses

    def outputs_fed_back(self, batch: int, num_rows: int) -> StepOutputs:
        """`outputs`, and greedy ids and the lengths that follow become the inputs of `batch` rows, on the device."""
        lengths = self._seqlens.host[:batch]
        following = lengths + np.minimum(lengths, 1)
        self._memory.copy(self._ids.tensor, self._samples[GREEDY_IDS], batch)
        self._memory.copy(self._seqlens.tensor, self._samples[NEXT_SEQLENS_K], batch)
        outputs = self.outputs(num_rows)
        # not earlier: uploads of what stands on the host may have been under way until `outputs` has waited
        self._ids.note(self._samples[GREEDY_IDS].host[:num_rows, 0])
        self._seqlens.note(following)
        return outputs

    def outputs(self, num_rows: int) -> StepOutputs:
        """Wait for the step; returns its first `num_rows` rows."""
        outputs = StepOutputs(self._memory, self._logits, self._samples, num_rows=num_rows, vocab_size=self._vocab_size)
        self._memory.synchronize()
        return outputs

    def _bind_step(self, shape: StepShape) -> None:
        self._bind("bind_input", INPUT_IDS, self._ids.tensor, (shape.batch, shape.length))
        self._bind("bind_input", SEQLENS_K, self._seqlens.tensor, (shape.batch,))
        if self._window_seqlens is not None:
            self._bind("bind_input", WINDOW_SEQLENS_K, self._window_seqlens.tensor, (shape.batch,))
        self._bind("bind_input", LOGITS_ROWS, self._rows.tensor, (shape.num_rows,))
        self._bind("bind_output", LOGITS, self._logits, (shape.num_rows, self._vocab_size))
        if self._sources is not None:
            self._bind("bind_input", SOURCE_LENGTHS, self._sources.tensor, (shape.batch,))
        for name, tensor in self._samples.items():
            rows = shape.batch if name == NEXT_SEQLENS_K else shape.num_rows
            self._bind("bind_output", name, tensor, (rows, *tensor.shape[1:]))

    def _bind(self, how: str, name: str, tensor: DeviceTensor, shape: tuple[int, ...]) -> None:
        place = (self._memory.device, self._memory.device_id, ELEMENT_TYPES[tensor.dtype])
        getattr(self._binding, how)(name, *place, shape, tensor.address)

    def _bind_cache(self, cache: KVCache, first_slot: int, batch: int) -> None:
        addresses = []
        for (past, present), spec, buffer in zip(self._cache_names, cache.specs, cache.buffers, strict=True):
            addresses.append(buffer.address(first_slot))
            place = (self._memory.device, self._memory.device_id, ELEMENT_TYPES[spec.dtype])
            shape = (batch, *buffer.shape[1:])
            self._binding.bind_input(past, *place, shape, addresses[-1])
            self._binding.bind_output(present, *place, shape, addresses[-1])
        self._addresses = (*addresses, cache.capacity)
        if cache.source is not None:
            for spec, buffer in zip(cache.source.specs, cache.source.buffers, strict=True):
                place = (self._memory.device, self._memory.device_id, ELEMENT_TYPES[spec.dtype])
                self._binding.bind_input(spec.name, *place, (batch, *buffer.shape[1:]), buffer.address(first_slot))


class _Input:
    """An input vector and what is known of its contents on the device."""

    def __init__(self, memory: DeviceMemory, size: int, dtype: DType) -> None:
        self.tensor = memory.tensor((size,), dtype)
        self.host = self.tensor.host
        self._memory = memory
        self._num_known = size  # values of `host` from the beginning that the device holds too
        self.host[:] = 0
        self.tensor.upload(size)

    def write(self, values: NDArray[Any]) -> None:
        size = len(values)
        known = self.host[:size]
        if size <= self._num_known and known.tobytes() == values.astype(known.dtype, copy=False).tobytes():
            return
        known[:] = values
        self.tensor.upload(size)
        self._num_known = max(self._num_known, size)

    def take(self, ids: DeviceIds) -> None:
        self._memory.copy_bytes(self.tensor, ids.address, ids.num_bytes)
        self._num_known = 0

    def note(self, values: NDArray[Any]) -> None:
        """The device holds `values` at the beginning now; what follows them may have changed as well."""
        self.host[: len(values)] = values
        self._num_known = len(values)


def _sizes(spec: TensorSpec, room: StepShape) -> tuple[int, ...]:
    symbols = {"rows": room.num_rows, "batch": room.batch}
    return tuple(symbols[size] if isinstance(size, str) else size for size in spec.shape)
