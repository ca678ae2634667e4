"""What the CUDA runtime says of this machine: driver, devices, free memory.

In: a device number. Out: counts and bytes. It takes nothing from a device but the context that asking for its memory
needs, and leaves the calling thread's current device alone. The libraries must be loaded (see `cuda_libraries.py`).
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from graphport.runtime.cuda_libraries import CUDA_RUNTIME_LIBRARY

# Of cuda_runtime_api.h: what cudaGetDeviceCount returns when there is nothing to count.
_NO_DEVICE, _OLD_DRIVER = 100, 35


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed; the message names the call, the number and the runtime's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of a device: free now, for all processes, and in total."""

    free: int
    total: int


def driver_version() -> int:
    """The newest CUDA version that the installed driver serves, as 1000 * major + 10 * minor; 0 without a driver."""
    version = ctypes.c_int()
    _call("cudaDriverGetVersion", ctypes.byref(version))
    return version.value


def num_devices() -> int:
    """Devices that this process may use (CUDA_VISIBLE_DEVICES counts). Raises CudaError when the driver is broken."""
    count = ctypes.c_int()
    _call("cudaGetDeviceCount", ctypes.byref(count), allowed=(_NO_DEVICE, _OLD_DRIVER))
    return count.value


def device_memory(device_id: int) -> DeviceMemory:
    """Memory of one device. Raises CudaError, for example when another process holds the device for itself."""
    # the current device is a property of a thread, so the question is asked in one of its own
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(_memory_of_current, device_id).result()


def _memory_of_current(device_id: int) -> DeviceMemory:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cudaSetDevice", ctypes.c_int(device_id))
    _call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
    return DeviceMemory(free=free.value, total=total.value)


def _call(function: str, *arguments: object, allowed: tuple[int, ...] = ()) -> None:
    library = ctypes.CDLL(CUDA_RUNTIME_LIBRARY)
    status = getattr(library, function)(*arguments)
    if status and status not in allowed:
        library.cudaGetErrorString.restype = ctypes.c_char_p
        words = library.cudaGetErrorString(ctypes.c_int(status)).decode()
        raise CudaError(f"{function} failed with CUDA error {status}: {words}")
