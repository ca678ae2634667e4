"""Choose an execution provider, open an ONNX Runtime session on it, and check that it is what was asked for.

In: a graph path, session options and a wish (auto, cpu, cuda). Out: a device that can be used, a session that really
runs on it. It does not look at the graph or plan memory (see `opening.py`), nor place nodes (see `session.py`).
"""

import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import onnxruntime
import psutil  # type: ignore[import-untyped]  # it ships no types
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from graphport.runtime.cuda_device import CudaError, driver_version, num_devices
from graphport.runtime.cuda_libraries import CUDA_MAJOR, installed_wheels, library_problem, wheel_problem
from graphport.runtime.cuda_options import OptionValue

DeviceWish = Literal["auto", "cpu", "cuda"]
PrefillProducts = Literal["as_exported", "float32"]
Device = Literal["cpu", "cuda"]

_DRIVER = 580  # the first series of drivers for CUDA 13 on Linux

_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"

# The first would move a bias into MatMulNBits, whose compact GEMM takes none: the node would fall to a slower kernel.
# The second would move the norms of query and key heads into attention, where they bar the fast kernel for quantised
# caches; where they belong there, the exporter has put them there.
CUDA_DISABLED_OPTIMIZERS = ("MatMulNBitsFusion", "GroupQueryAttentionPreNormFusion")

# ONNX Runtime's errors derive from Exception directly and share no base class of their own.
ORT_ERRORS: tuple[type[Exception], ...] = (
    ort_errors.EPFail,
    ort_errors.EngineError,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NoSuchFile,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
    RuntimeError,
)


class DeviceError(RuntimeError):
    """The device asked for cannot be used; the message says why and what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """Where a caller wants to run. `device_id` and `provider_options` are for CUDA alone.

    `prepared`: on the CPU, take the graph that was packed for this processor, if there is one. `spinning`: idle threads
    of the CPU wait in busy loops. `prefill_products`: see `prefill_products.py`.
    """

    wish: DeviceWish = "auto"
    device_id: int = 0
    provider_options: Mapping[str, OptionValue] | None = None
    prepared: bool = True
    spinning: bool = True
    prefill_products: PrefillProducts = "as_exported"

    def __post_init__(self) -> None:
        if self.wish not in get_args(DeviceWish):
            raise ValueError(f"device must be one of {', '.join(get_args(DeviceWish))}; got {self.wish!r}")
        if self.prefill_products not in get_args(PrefillProducts):
            known = " or ".join(get_args(PrefillProducts))
            raise ValueError(f"prefill_products must be {known}; got {self.prefill_products!r}")
        if isinstance(self.device_id, bool) or not isinstance(self.device_id, numbers.Integral):
            kind = type(self.device_id).__name__
            raise TypeError(f"device_id must be a whole number from 0, got {self.device_id!r} ({kind})")
        if self.device_id < 0:
            raise ValueError(f"device_id must be a whole number from 0, got {self.device_id}")

    def require_plain(self, reason: str) -> None:
        """Raise ValueError when something was asked for that the CPU, taken because of `reason`, would ignore."""
        asked = [name for name in ("device_id", "provider_options") if getattr(self, name)]
        if asked:
            why = f"device auto took the CPU ({reason})" if self.wish == "auto" else "device is 'cpu'"
            raise ValueError(f"{' and '.join(asked)} cannot be heeded: {why}; leave out, or use device='cuda'")


def choose_device(request: DeviceRequest, *, target: str) -> tuple[Device, str]:
    """The device to open, and in words why not another.

    `auto` follows the bundle's `target`: CUDA for a bundle compiled for it if CUDA can start, else the CPU. Raises
    DeviceError when `cuda` was asked for and cannot start.
    """
    if request.wish == "cpu":
        return "cpu", ""
    if request.wish == "auto" and target != "cuda":
        return "cpu", f"the bundle was compiled for {target}"
    problem = cuda_problem(request.device_id)
    if problem is None:
        return "cuda", ""
    if request.wish == "cuda":
        raise DeviceError(f"device cuda cannot be used: {problem}; use device='cpu' to run without it")
    return "cpu", problem


def cuda_problem(device_id: int = 0) -> str | None:
    """Why CUDA device `device_id` cannot be used here, in words that say what to do; None when nothing is known."""
    return wheel_problem() or library_problem() or _driver_problem() or _device_problem(device_id)


def open_inference_session(
    graph: Path, options: onnxruntime.SessionOptions, device: Device, provider_options: Mapping[str, str]
) -> Any:  # noqa: ANN401 - ORT is untyped
    """Open `graph` on `device`. Raises DeviceError unless ONNX Runtime really took the device, else its own errors."""
    providers: list[Any] = [_CPU] if device == "cpu" else [(_CUDA, dict(provider_options)), _CPU]
    disabled = CUDA_DISABLED_OPTIMIZERS if device == "cuda" else ()
    try:
        session = onnxruntime.InferenceSession(
            str(graph), options, providers=providers, enable_fallback=0, disabled_optimizers=list(disabled)
        )
    except ORT_ERRORS as error:
        if device == "cuda" and "cuda" in str(error).replace(str(graph), "").lower():
            words = " ".join(str(error).split())
            raise DeviceError(f"device cuda is listed but does not start{_wheels_note()}: {words}") from error
        raise
    found = session.get_providers()
    if device == "cuda" and found[0] != _CUDA:
        raise DeviceError(
            f"device cuda is listed but did not start{_wheels_note()}; ONNX Runtime took {', '.join(found)}. Reinstall "
            "onnxruntime-gpu, or use device='cpu'"
        )
    return session


def _driver_problem() -> str | None:
    version = driver_version()
    if version >= 1000 * CUDA_MAJOR:
        return None
    return (
        f"the NVIDIA driver is too old: it serves CUDA {version // 1000}.{version % 1000 // 10}, onnxruntime-gpu "
        f"{onnxruntime.__version__} needs {CUDA_MAJOR}.0; update the driver to version {_DRIVER} or newer"
    )


def _device_problem(device_id: int) -> str | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "CUDA_VISIBLE_DEVICES is not set" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
    try:
        count = num_devices()
    except CudaError as error:
        return f"the driver counts no devices: {error} ({setting})"
    if count == 0:
        return f"no CUDA device is visible: {setting}" + ("" if visible is None else ", unset it or name a device: 0")
    if device_id >= count:
        number = "is 1 device, number 0" if count == 1 else f"are {count} devices, numbers 0 to {count - 1}"
        return f"device_id is {device_id}, but there {number} ({setting})"
    return None


def _wheels_note() -> str:
    wheels = installed_wheels()
    return f" ({' and '.join(wheels)} are installed over each other: uninstall all, then install onnxruntime-gpu)" * (
        len(wheels) > 1
    )


def default_threads() -> int:
    """Threads for one session: physical cores, within the process's CPU affinity and cgroup quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical, _cgroup_cpus() or allowed))


def _cgroup_cpus() -> int | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # no cgroup v2 here: no quota to respect
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))
