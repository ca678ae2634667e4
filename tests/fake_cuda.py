"""A CUDA runtime on host memory that runs in the test's own process, counts what is copied, and is strict about order.

In: the calls of `runtime/cuda_runtime.py`. Out: the same effects, late where the real ones may be late: a download is
there after the stream is synchronised and not before, and an upload's source must not change until then. Memory begins
as garbage.
"""

import ctypes
from collections import Counter
from typing import Any

import numpy as np
import pytest

from graphport.runtime import cuda_runtime
from graphport.runtime.cuda_runtime import CudaRuntime
from graphport.runtime.device_memory import CudaMemory
from graphport.runtime.session import Session

_KINDS = {1: "upload", 2: "download", 3: "copy"}


class _ErrorString:
    restype: Any = None

    def __call__(self, status: ctypes.c_int) -> bytes:
        return f"fake error {status.value}".encode()


class FakeCudart:
    """What `ctypes.CDLL` gives for libcudart. `bytes` and `calls` count copies by direction; `status` is returned."""

    def __init__(self) -> None:
        self.status = 0
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.blocks: dict[int, np.ndarray[Any, Any]] = {}
        self.given_back: list[np.ndarray[Any, Any]] = []  # kept, so that a replay at stale addresses harms no one
        self.streams: list[int] = []
        self.cudaGetErrorString = _ErrorString()
        self._downloads: list[tuple[int, int, int]] = []
        self._uploads: list[tuple[int, bytes]] = []

    def reset(self) -> None:
        """Count from here."""
        self.bytes.clear()
        self.calls.clear()

    def cudaSetDevice(self, device: ctypes.c_int) -> int:  # noqa: N802 - the library's name, as below
        assert device.value == 0
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.calls["error taken back"] += 1
        return self.status

    def cudaMemGetInfo(self, free: Any, total: Any) -> int:  # noqa: N802
        free._obj.value = total._obj.value = 1 << 30
        return self.status

    def cudaMalloc(self, address: Any, size: ctypes.c_size_t) -> int:  # noqa: N802
        block = np.full(size.value, 0xA5, np.uint8)
        self.blocks[block.ctypes.data] = block
        address._obj.value = block.ctypes.data
        return self.status

    cudaMallocHost = cudaMalloc  # noqa: N815

    def cudaFree(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        self.given_back.append(self.blocks.pop(address.value or 0))
        return self.status

    cudaFreeHost = cudaFree  # noqa: N815

    def cudaStreamCreate(self, stream: Any) -> int:  # noqa: N802
        self.streams.append(0x1000 + len(self.streams))
        stream._obj.value = self.streams[-1]
        return self.status

    def cudaStreamDestroy(self, stream: ctypes.c_void_p) -> int:  # noqa: N802
        self.streams.remove(stream.value or 0)
        return self.status

    def cudaMemcpyAsync(self, target: Any, source: Any, size: Any, kind: Any, _stream: Any) -> int:  # noqa: N802
        direction = _KINDS[kind.value]
        self.calls[direction] += 1
        self.bytes[direction] += size.value
        if direction == "download":
            self._downloads.append((target.value, source.value, size.value))
            return self.status
        if direction == "upload":
            self._uploads.append((source.value, ctypes.string_at(source.value, size.value)))
        ctypes.memmove(target.value, source.value, size.value)
        return self.status

    def cudaMemsetAsync(self, address: Any, value: Any, size: Any, _stream: Any) -> int:  # noqa: N802
        ctypes.memset(address.value, value.value, size.value)
        return self.status

    def cudaMemcpy2DAsync(self, *args: Any) -> int:  # noqa: N802
        target, target_pitch, source, source_pitch, width, height, kind, _ = (arg.value for arg in args)
        for row in range(height):
            pair = (target + row * target_pitch, source + row * source_pitch)
            if _KINDS[kind] == "download":
                self._downloads.append((*pair, width))
                continue
            if _KINDS[kind] == "upload":
                self._uploads.append((pair[1], ctypes.string_at(pair[1], width)))
            ctypes.memmove(*pair, width)
        return self.status

    def cudaStreamSynchronize(self, _stream: ctypes.c_void_p) -> int:  # noqa: N802
        self.calls["synchronize"] += 1
        for target, source, size in self._downloads:
            ctypes.memmove(target, source, size)
        for source, sent in self._uploads:
            assert ctypes.string_at(source, len(sent)) == sent, "the source of an upload changed before it was done"
        self._downloads.clear()
        self._uploads.clear()
        return self.status


class FakeDeviceMemory(CudaMemory):
    """CudaMemory over a FakeCudart, in addresses that ONNX Runtime's CPU provider can compute in."""

    device = "cpu"


def fake_cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    """Let every CudaRuntime made from here on use a fake."""
    fake = FakeCudart()
    monkeypatch.setattr(cuda_runtime.ctypes, "CDLL", lambda _: fake)
    return fake


def on_fake_device(session: Session, monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    """Let a session on the CPU that has not run yet move its inputs and outputs as one on CUDA does."""
    fake = fake_cudart(monkeypatch)
    session._memory = FakeDeviceMemory(CudaRuntime())
    return fake
