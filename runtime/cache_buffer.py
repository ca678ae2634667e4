"""Memory of one cache tensor, [slots, heads, capacity, head_dim], in host memory or on a CUDA device.

In: sizes and an element type. Out: addresses of slots, and copies of rows. Contents start undefined; it knows no
sequences (see `kv_cache.py`).
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from graphport.model_def.signature import DType
from graphport.runtime.cuda_runtime import CudaRuntime

# numpy has no bfloat16 and no float8; their bits travel as integers and the graph is told the element type by number.
NUMPY_DTYPES: dict[DType, DTypeLike] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8e4m3fn": np.uint8,
    "int64": np.int64,
    "int32": np.int32,
    "int8": np.int8,
    "uint8": np.uint8,
}


Rows = tuple[NDArray[np.generic], ...]  # of every cache buffer, [kv_heads, tokens, width], on the host


class KeptRows(NamedTuple):
    """What a slot holds, on the host: `length` tokens; of each buffer, rows from the token that `firsts` names on."""

    length: int
    rows: Rows
    firsts: tuple[int, ...]


class CacheBuffer(Protocol):
    """One tensor of shape `shape`; rows are copied up to a length in tokens."""

    shape: tuple[int, int, int, int]

    def address(self, slot: int) -> int:
        """Memory address of slot `slot`; the slots that follow are contiguous."""

    def copy_row(self, source: "CacheBuffer", source_slot: int, slot: int, length: int) -> None:
        """Copy the first `length` tokens of a row of `source`, which may have another capacity, into row `slot`."""

    def read_tokens(self, slot: int, begin: int, end: int) -> NDArray[np.generic]:
        """A copy on the host of tokens begin .. end-1 of row `slot`, [heads, tokens, head_dim]."""

    def write_tokens(self, slot: int, begin: int, tokens: NDArray[np.generic]) -> None:
        """Put `tokens` [heads, tokens, head_dim] from the host into row `slot`, from token `begin` on."""


class HostBuffer:
    """A CacheBuffer in host memory; pages are taken from the system when first written."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: DType, device_id: int = 0) -> None:  # noqa: ARG002 - as CudaBuffer
        self.shape = shape
        self.array: NDArray[np.generic] = np.empty(shape, NUMPY_DTYPES[dtype])
        self._base = self.array.ctypes.data
        self._stride = self.array.strides[0]

    @classmethod
    def cleared(cls, shape: tuple[int, int, int, int], dtype: DType) -> "HostBuffer":
        """A buffer of zeros, for kernels that multiply what lies beyond a row's length by 0."""
        buffer = cls(shape, dtype)
        buffer.array.fill(0)
        return buffer

    def address(self, slot: int) -> int:
        """See CacheBuffer."""
        return self._base + slot * self._stride

    def copy_row(self, source: CacheBuffer, source_slot: int, slot: int, length: int) -> None:
        """See CacheBuffer."""
        assert isinstance(source, HostBuffer)
        self.array[slot, :, :length] = source.array[source_slot, :, :length]

    def read_tokens(self, slot: int, begin: int, end: int) -> NDArray[np.generic]:
        """See CacheBuffer."""
        return self.array[slot, :, begin:end].copy()

    def write_tokens(self, slot: int, begin: int, tokens: NDArray[np.generic]) -> None:
        """See CacheBuffer."""
        self.array[slot, :, begin : begin + tokens.shape[1]] = tokens


class CudaBuffer:
    """A CacheBuffer in CUDA device memory; copies are queued on the session's stream, before whatever runs next."""

    def __init__(self, cuda: CudaRuntime, shape: tuple[int, int, int, int], dtype: DType) -> None:
        self.shape = shape
        self._cuda = cuda
        self._dtype = NUMPY_DTYPES[dtype]
        self._token_bytes = shape[3] * np.dtype(NUMPY_DTYPES[dtype]).itemsize
        self._head_bytes = shape[2] * self._token_bytes
        num_bytes = shape[0] * shape[1] * self._head_bytes
        self._block = cuda.allocate(num_bytes)
        cuda.clear(self._block.address, num_bytes)  # kernels may multiply what lies beyond a row's length by 0

    def address(self, slot: int) -> int:
        """See CacheBuffer."""
        return self._block.address + slot * self.shape[1] * self._head_bytes

    def copy_row(self, source: CacheBuffer, source_slot: int, slot: int, length: int) -> None:
        """See CacheBuffer."""
        assert isinstance(source, CudaBuffer)
        self._cuda.copy_rows(
            self.address(slot),
            self._head_bytes,
            source.address(source_slot),
            source._head_bytes,
            width=length * self._token_bytes,
            num_rows=self.shape[1],
        )

    def read_tokens(self, slot: int, begin: int, end: int) -> NDArray[np.generic]:
        """See CacheBuffer."""
        tokens: NDArray[np.generic] = np.empty((self.shape[1], end - begin, self.shape[3]), self._dtype)
        width = (end - begin) * self._token_bytes
        source = self.address(slot) + begin * self._token_bytes
        self._cuda.download_rows(
            tokens.ctypes.data, width, source, self._head_bytes, width=width, num_rows=self.shape[1]
        )
        self._cuda.synchronize()
        return tokens

    def write_tokens(self, slot: int, begin: int, tokens: NDArray[np.generic]) -> None:
        """See CacheBuffer."""
        tokens = np.ascontiguousarray(tokens)
        width = tokens.shape[1] * self._token_bytes
        target = self.address(slot) + begin * self._token_bytes
        self._cuda.upload_rows(target, self._head_bytes, tokens.ctypes.data, width, width=width, num_rows=self.shape[1])
        self._cuda.synchronize()  # the copy reads `tokens`, which may be gone later
