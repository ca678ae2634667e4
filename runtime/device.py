"""Choose an execution provider, open an ONNX Runtime session on it, and check that it is what was asked for.

In: a graph path, session options and a wish (auto, cpu, cuda). Out: a session and the device it really runs on.
It does not look at the graph's inputs or place nodes (see `session.py`).
"""

import contextlib
import ctypes
import io
import logging
import os
from pathlib import Path
from typing import Any, Literal, get_args

import onnxruntime
import psutil  # type: ignore[import-untyped]  # it ships no types
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from graphport.runtime.cuda_setup import CudaSetup

DeviceWish = Literal["auto", "cpu", "cuda"]
Device = Literal["cpu", "cuda"]

# What libonnxruntime_providers_cuda.so of ONNX Runtime 1.31 links to (CUDA 13).
CUDA_LIBRARIES = ("libcuda.so.1", "libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10")

_PROVIDERS: dict[Device, tuple[str, ...]] = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
}

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

_log = logging.getLogger(__name__)


class DeviceError(RuntimeError):
    """The device asked for cannot be used; the message says why and what to install."""


def open_inference_session(
    graph: Path, options: onnxruntime.SessionOptions, *, wish: DeviceWish, target: str, cuda: CudaSetup
) -> tuple[Any, Device]:
    """Open `graph` on the device of `wish` and verify that ONNX Runtime really took it.

    `auto` follows the bundle's `target`: CUDA for a bundle compiled for it if CUDA can start, else the CPU; one log
    line says what it took and why. On CUDA it runs on the stream of `cuda` and captures graphs if that says so and ONNX
    Runtime agrees. Raises DeviceError when `cuda` was asked for and cannot start.
    """
    if wish not in get_args(DeviceWish):
        raise ValueError(f"device must be one of {', '.join(get_args(DeviceWish))}; got {wish!r}")
    if wish == "auto":
        problem = cuda_problem() if target == "cuda" else f"the bundle was compiled for {target}"
        if problem is None:
            try:
                session = _open(graph, options, "cuda", cuda)
            except DeviceError as error:
                problem = str(error)
            else:
                _log.info("device auto: cuda")
                return session, "cuda"
        _log.log(logging.WARNING if target == "cuda" else logging.INFO, "device auto: cpu (%s)", problem)
        return _open(graph, options, "cpu", cuda), "cpu"
    if wish == "cuda":
        problem = cuda_problem()
        if problem is not None:
            raise DeviceError(f"device cuda cannot be used: {problem}; use device='cpu' to run without it")
    return _open(graph, options, wish, cuda), wish


def cuda_problem() -> str | None:
    """Why CUDA cannot start here, in words that say what to install; None when nothing is known to be missing."""
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return (
            f"the installed onnxruntime {onnxruntime.__version__} was built without CUDA; uninstall onnxruntime and "
            "install onnxruntime-gpu (both share one folder: keep only one)"
        )
    # Libraries of nvidia wheels are found only after this; it prints what it misses, and we say it better.
    with contextlib.redirect_stdout(io.StringIO()):
        onnxruntime.preload_dlls(cuda=True, cudnn=True)
    missing = [name for name in CUDA_LIBRARIES if not _can_load(name)]
    if not missing:
        return None
    advice = "install CUDA 13, or run pip install 'onnxruntime-gpu[cuda]' nvidia-cublas"
    if "libcuda.so.1" in missing:
        advice = f"without libcuda.so.1 there is no NVIDIA driver here, or this container hides it; then {advice}"
    return f"{', '.join(missing)} cannot be loaded; {advice}"


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


def _open(graph: Path, options: onnxruntime.SessionOptions, device: Device, cuda: CudaSetup) -> Any:  # noqa: ANN401 - ORT is untyped
    wanted = list(_PROVIDERS[device])
    try:
        provider_options = [cuda.provider_options() if device == "cuda" else {}, *({} for _ in wanted[1:])]
        session = onnxruntime.InferenceSession(
            str(graph), options, providers=wanted, provider_options=provider_options, enable_fallback=0
        )
    except ORT_ERRORS as error:
        if device == "cuda" and cuda.refuse(error):
            return _open(graph, options, device, cuda)
        if device == "cuda" and "cuda" in str(error).lower():
            raise DeviceError(f"device cuda is listed by ONNX Runtime but does not start: {error}") from error
        raise
    if session.get_providers()[0] != wanted[0]:
        raise DeviceError(
            f"device {device} is listed by ONNX Runtime but did not start; it fell back to "
            f"{', '.join(session.get_providers())}. Check the NVIDIA driver and CUDA 13 libraries, or use device='cpu'"
        )
    return session


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
