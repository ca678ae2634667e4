"""Memory of one cache tensor, [slots, heads, capacity, head_dim], in host memory or on a CUDA device.

In: sizes and an element type. Out: addresses of slots, and copies of rows. Contents start undefined; it knows no
sequences (see `kv_cache.py`).
"""

import ctypes
from typing import Protocol

import numpy as np
import onnxruntime
from numpy.typing import DTypeLike, NDArray

from graphport.model_def.signature import DType
from graphport.runtime.device import Device

# numpy has no bfloat16; its bits travel as uint16 and the graph is told the element type by number.
NUMPY_DTYPES: dict[DType, DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "int64": np.int64,
    "int32": np.int32,
    "int8": np.int8,
    "uint8": np.uint8,
}

_CUDA_MEMCPY_DEVICE_TO_DEVICE = 3


class CacheBuffer(Protocol):
    """One tensor of shape `shape`; rows are copied up to a length in tokens."""

    shape: tuple[int, int, int, int]

    def address(self, slot: int) -> int:
        """Memory address of slot `slot`; the slots that follow are contiguous."""

    def copy_row(self, source: "CacheBuffer", source_slot: int, slot: int, length: int) -> None:
        """Copy the first `length` tokens of a row of `source`, which may have another capacity, into row `slot`."""


class HostBuffer:
    """A CacheBuffer in host memory; pages are taken from the system when first written."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: DType, device_id: int = 0) -> None:  # noqa: ARG002 - as CudaBuffer
        self.shape = shape
        self.array: NDArray[np.generic] = np.empty(shape, NUMPY_DTYPES[dtype])
        self._base = self.array.ctypes.data
        self._stride = self.array.strides[0]

    def address(self, slot: int) -> int:
        """See CacheBuffer."""
        return self._base + slot * self._stride

    def copy_row(self, source: CacheBuffer, source_slot: int, slot: int, length: int) -> None:
        """See CacheBuffer."""
        assert isinstance(source, HostBuffer)
        self.array[slot, :, :length] = source.array[source_slot, :, :length]


class CudaBuffer:
    """A CacheBuffer on a CUDA device; copies go through the CUDA runtime and are finished on return."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: DType, device_id: int = 0) -> None:
        self.shape = shape
        self._value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, NUMPY_DTYPES[dtype], "cuda", device_id)
        self._base = int(self._value.data_ptr())
        self._token_bytes = shape[3] * np.dtype(NUMPY_DTYPES[dtype]).itemsize
        self._head_bytes = shape[2] * self._token_bytes
        self._cuda = ctypes.CDLL("libcudart.so.13")  # the library the provider has loaded already

    def address(self, slot: int) -> int:
        """See CacheBuffer."""
        return self._base + slot * self.shape[1] * self._head_bytes

    def copy_row(self, source: CacheBuffer, source_slot: int, slot: int, length: int) -> None:
        """See CacheBuffer."""
        assert isinstance(source, CudaBuffer)
        status = self._cuda.cudaMemcpy2D(
            ctypes.c_void_p(self.address(slot)),
            ctypes.c_size_t(self._head_bytes),
            ctypes.c_void_p(source.address(source_slot)),
            ctypes.c_size_t(source._head_bytes),
            ctypes.c_size_t(length * self._token_bytes),
            ctypes.c_size_t(self.shape[1]),
            ctypes.c_int(_CUDA_MEMCPY_DEVICE_TO_DEVICE),
        )
        # ONNX Runtime runs on a stream of its own, which does not wait for this copy.
        status = status or self._cuda.cudaDeviceSynchronize()
        if status:
            raise RuntimeError(f"moving a cache row on the CUDA device failed with CUDA error {status}")


BUFFERS: dict[Device, type[HostBuffer] | type[CudaBuffer]] = {"cpu": HostBuffer, "cuda": CudaBuffer}
