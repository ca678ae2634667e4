"""Tensors where a session computes: in host memory for the CPU, in device memory with a copy on the host for CUDA.

In: shapes, element types, rows to move. Out: addresses to bind, host arrays to read and write. On the CPU both are the
same memory and moving costs nothing. It runs nothing and knows no names of inputs (see `step_tensors.py`).
"""

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import DType
from graphport.runtime.cache_buffer import NUMPY_DTYPES
from graphport.runtime.cuda_runtime import CudaRuntime
from graphport.runtime.device import Device


class DeviceTensor(Protocol):
    """A tensor at a fixed address. `host` is its copy on the host, as of the last upload or download of each row.

    `owner` keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    dtype: DType
    row_bytes: int
    owner: object

    @property
    def host(self) -> NDArray[Any]:
        """Values on the host; a row is what the first axis indexes."""

    def upload(self, num_rows: int) -> None:
        """Queue the copy of the first `num_rows` host rows to the device."""

    def download(self, begin: int, end: int) -> None:
        """Queue the copy of rows begin .. end-1 to the host, there after the memory's `synchronize`."""


class DeviceMemory(Protocol):
    """Makes tensors on one device. Copies happen in order, and before anything that is run later.

    `device_id` is the number among devices of its kind; `stream` the address of the stream of the copies, None where
    there is none.
    """

    device: Device
    device_id: int
    stream: int | None

    def tensor(self, shape: Sequence[int], dtype: DType) -> DeviceTensor:
        """A new tensor; its contents are undefined."""

    def copy(self, target: DeviceTensor, source: DeviceTensor, num_rows: int) -> None:
        """Queue the copy of the first `num_rows` rows on the device; `target.host` is not touched."""

    def copy_bytes(self, target: DeviceTensor, address: int, num_bytes: int) -> None:
        """Queue the copy of bytes of the device at `address` to the beginning of `target`."""

    def synchronize(self) -> None:
        """Wait for all that is queued."""


class HostTensor:
    """A DeviceTensor of the CPU: `host` is the memory itself."""

    def __init__(self, shape: Sequence[int], dtype: DType) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self.row_bytes = _row_bytes(shape, dtype)
        self.host: NDArray[Any] = np.zeros(shape, NUMPY_DTYPES[dtype])
        self.owner: object = self.host
        self.address = self.host.ctypes.data

    def upload(self, num_rows: int) -> None:
        """Nothing to do: see DeviceTensor."""

    def download(self, begin: int, end: int) -> None:
        """Nothing to do: see DeviceTensor."""


class HostMemory:
    """The DeviceMemory of the CPU."""

    device: Device = "cpu"
    device_id = 0
    stream: int | None = None

    def tensor(self, shape: Sequence[int], dtype: DType) -> DeviceTensor:
        """See DeviceMemory."""
        return HostTensor(shape, dtype)

    def copy(self, target: DeviceTensor, source: DeviceTensor, num_rows: int) -> None:
        """See DeviceMemory."""
        self.copy_bytes(target, source.address, num_rows * source.row_bytes)

    def copy_bytes(self, target: DeviceTensor, address: int, num_bytes: int) -> None:
        """See DeviceMemory."""
        ctypes.memmove(target.address, address, num_bytes)

    def synchronize(self) -> None:
        """Nothing to do: copies are done at once."""


class CudaTensor:
    """A DeviceTensor in device memory; pinned memory for its host copy is taken when first asked for."""

    def __init__(self, cuda: CudaRuntime, shape: Sequence[int], dtype: DType) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self.row_bytes = _row_bytes(shape, dtype)
        self._cuda = cuda
        block = cuda.allocate(self.shape[0] * self.row_bytes)
        self._host: NDArray[Any] | None = None
        self.owner: object = block
        self.address = block.address

    @property
    def host(self) -> NDArray[Any]:
        """See DeviceTensor."""
        if self._host is None:
            block = self._cuda.allocate_host(self.shape[0] * self.row_bytes)
            flat = np.frombuffer(memoryview(block.bytes()), NUMPY_DTYPES[self.dtype])  # keeps the block alive
            flat[:] = 0
            self._host = flat.reshape(self.shape)
        return self._host

    def upload(self, num_rows: int) -> None:
        """See DeviceTensor."""
        self._cuda.upload(self.address, self.host.ctypes.data, num_rows * self.row_bytes)

    def download(self, begin: int, end: int) -> None:
        """See DeviceTensor."""
        offset = begin * self.row_bytes
        num_bytes = (end - begin) * self.row_bytes
        self._cuda.download(self.host.ctypes.data + offset, self.address + offset, num_bytes)


class CudaMemory:
    """The DeviceMemory of one CUDA device; copies and waits are those of one stream."""

    device: Device = "cuda"

    def __init__(self, cuda: CudaRuntime) -> None:
        self.cuda = cuda
        self.device_id = cuda.device_id
        self.stream: int | None = cuda.stream

    def tensor(self, shape: Sequence[int], dtype: DType) -> DeviceTensor:
        """See DeviceMemory."""
        return CudaTensor(self.cuda, shape, dtype)

    def copy(self, target: DeviceTensor, source: DeviceTensor, num_rows: int) -> None:
        """See DeviceMemory."""
        self.copy_bytes(target, source.address, num_rows * source.row_bytes)

    def copy_bytes(self, target: DeviceTensor, address: int, num_bytes: int) -> None:
        """See DeviceMemory."""
        self.cuda.copy(target.address, address, num_bytes)

    def synchronize(self) -> None:
        """See DeviceMemory."""
        self.cuda.synchronize()


def _row_bytes(shape: Sequence[int], dtype: DType) -> int:
    return prod(shape[1:]) * np.dtype(NUMPY_DTYPES[dtype]).itemsize
