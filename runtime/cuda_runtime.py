"""The CUDA runtime functions that decoding needs beside ONNX Runtime: memory, one stream, copies in its order.

In: sizes and addresses. Out: device and pinned host memory, copies queued on a stream; CudaError or
NotEnoughMemoryError with the runtime's own words. It knows no tensors (see `device_memory.py`) and no graphs.
"""

import ctypes
import weakref

from graphport.runtime.cuda_device import CudaError
from graphport.runtime.cuda_libraries import CUDA_RUNTIME_LIBRARY
from graphport.runtime.memory import NotEnoughMemoryError

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation

_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3


class CudaRuntime:
    """The CUDA runtime for one device and one stream; `stream` is the address of the cudaStream_t."""

    def __init__(self, *, device_id: int = 0, stream: int | None = None) -> None:
        """Take the caller's `stream`, or make one that waits for the legacy default stream, and that stream for it."""
        self._library = ctypes.CDLL(CUDA_RUNTIME_LIBRARY)  # the one that ONNX Runtime's provider has loaded
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self.device_id = device_id
        self._call("cudaSetDevice", ctypes.c_int(device_id))
        self.stream = self._new_stream() if stream is None else stream

    def allocate(self, num_bytes: int) -> "CudaMemoryBlock":
        """Device memory of exactly this size (ONNX Runtime's own allocator rounds up to a power of two)."""
        return self._new_block("cudaMalloc", num_bytes, free="cudaFree")

    def allocate_host(self, num_bytes: int) -> "CudaMemoryBlock":
        """Pinned host memory, which copies need in order not to wait for the stream."""
        return self._new_block("cudaMallocHost", num_bytes, free="cudaFreeHost")

    def upload(self, device: int, host: int, num_bytes: int) -> None:
        """Queue a copy from the host; the source must stay as it is until the stream is synchronised."""
        self._copy(device, host, num_bytes, _HOST_TO_DEVICE)

    def download(self, host: int, device: int, num_bytes: int) -> None:
        """Queue a copy to the host, there once the stream is synchronised."""
        self._copy(host, device, num_bytes, _DEVICE_TO_HOST)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Queue a copy on the device."""
        self._copy(target, source, num_bytes, _DEVICE_TO_DEVICE)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, *, width: int, num_rows: int
    ) -> None:
        """Queue a copy on the device of `num_rows` pieces of `width` bytes that lie `pitch` bytes apart."""
        self._copy_rows(target, target_pitch, source, source_pitch, width, num_rows, _DEVICE_TO_DEVICE)

    def upload_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, *, width: int, num_rows: int
    ) -> None:
        """`copy_rows` from the host; the source must not change before the stream is synchronised."""
        self._copy_rows(target, target_pitch, source, source_pitch, width, num_rows, _HOST_TO_DEVICE)

    def download_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, *, width: int, num_rows: int
    ) -> None:
        """`copy_rows` to the host, there once the stream is synchronised."""
        self._copy_rows(target, target_pitch, source, source_pitch, width, num_rows, _DEVICE_TO_HOST)

    def clear(self, device: int, num_bytes: int) -> None:
        """Queue zeros for device memory."""
        self._call(
            "cudaMemsetAsync",
            ctypes.c_void_p(device),
            ctypes.c_int(0),
            ctypes.c_size_t(num_bytes),
            ctypes.c_void_p(self.stream),
        )

    def synchronize(self) -> None:
        """Wait until everything queued on the stream is done."""
        self._call("cudaStreamSynchronize", ctypes.c_void_p(self.stream))

    def _copy(self, target: int, source: int, num_bytes: int, kind: int) -> None:
        addresses = ctypes.c_void_p(target), ctypes.c_void_p(source)
        self._call(
            "cudaMemcpyAsync", *addresses, ctypes.c_size_t(num_bytes), ctypes.c_int(kind), ctypes.c_void_p(self.stream)
        )

    def _copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, num_rows: int, kind: int
    ) -> None:
        self._call(
            "cudaMemcpy2DAsync",
            ctypes.c_void_p(target),
            ctypes.c_size_t(target_pitch),
            ctypes.c_void_p(source),
            ctypes.c_size_t(source_pitch),
            ctypes.c_size_t(width),
            ctypes.c_size_t(num_rows),
            ctypes.c_int(kind),
            ctypes.c_void_p(self.stream),
        )

    def _new_stream(self) -> int:
        stream = ctypes.c_void_p()
        self._call("cudaStreamCreate", ctypes.byref(stream))
        address = int(stream.value or 0)
        weakref.finalize(self, self._library.cudaStreamDestroy, ctypes.c_void_p(address))
        return address

    def _new_block(self, function: str, num_bytes: int, *, free: str) -> "CudaMemoryBlock":
        address = ctypes.c_void_p()
        self._call("cudaSetDevice", ctypes.c_int(self.device_id))  # the thread's own may be another
        self._call(function, ctypes.byref(address), ctypes.c_size_t(max(1, num_bytes)))
        return CudaMemoryBlock(self._library, int(address.value or 0), num_bytes, free=free)

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if not status:
            return
        self._library.cudaGetLastError()  # or the next kernel of this thread would be blamed for it
        words = self._library.cudaGetErrorString(ctypes.c_int(status)).decode()
        if status == _OUT_OF_MEMORY:
            raise NotEnoughMemoryError(
                f"{function} failed with CUDA error {status}: {words}; lower max_length or max_batch, or give other "
                "programs' device memory back"
            )
        raise CudaError(f"{function} failed with CUDA error {status}: {words}")


class CudaMemoryBlock:
    """Memory of the CUDA runtime at `address`, given back when nothing refers to this object any more."""

    def __init__(self, library: ctypes.CDLL, address: int, num_bytes: int, *, free: str) -> None:
        self.address = address
        self._num_bytes = num_bytes
        weakref.finalize(self, getattr(library, free), ctypes.c_void_p(address))

    def bytes(self) -> "ctypes.Array[ctypes.c_uint8]":
        """The bytes of a block in host memory; what is made from them keeps the block alive."""
        view = (ctypes.c_uint8 * self._num_bytes).from_address(self.address)
        view.block = self  # type: ignore[attr-defined]  # ctypes objects take attributes
        return view
