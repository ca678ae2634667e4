"""Load the libraries that ONNX Runtime's CUDA provider links to, and say which are missing and what brings them.

In: this machine's installation. Out: loaded libraries, or the reason in one line. It opens no device and creates no
context (see `cuda_device.py`).
"""

import contextlib
import ctypes
import importlib.metadata
import logging
import sys
import threading
from typing import Any

import onnxruntime

CUDA_MAJOR = 13  # what the wheels of onnxruntime-gpu 1.31 are built for
CUDA_DRIVER_LIBRARY = "libcuda.so.1"
CUDA_RUNTIME_LIBRARY = "libcudart.so.13"

# What libonnxruntime_providers_cuda.so of ONNX Runtime 1.31 links to, besides the driver.
CUDA_LIBRARIES = (CUDA_RUNTIME_LIBRARY, "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10")
_CUDNN = "libcudnn.so.9"  # it opens this one when it is there

_INSTALL = "pip install 'graphport[cuda]'"
_CANNOT_OPEN = "cannot open shared object file"  # how the loader says that there is no such file

# preload_dlls prints, and two threads that exchange sys.stdout would not give it back in order.
_one_at_a_time = threading.Lock()

_log = logging.getLogger(__name__)


def wheel_problem() -> str | None:
    """Why the onnxruntime that is imported has no CUDA provider; None when it has."""
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return None
    wheels = installed_wheels()
    if len(wheels) > 1:
        both = " and ".join(wheels)
        return (
            f"{both} are installed over each other in one folder, and what is left has no CUDA; do: pip uninstall "
            f"{' '.join(wheels)}, then pip install onnxruntime-gpu"
        )
    return (
        f"the installed {wheels[0] if wheels else 'onnxruntime'} {onnxruntime.__version__} was built without CUDA; "
        f"do: pip uninstall {wheels[0] if wheels else 'onnxruntime'}, then pip install onnxruntime-gpu"
    )


def library_problem() -> str | None:
    """Load what the provider needs. Why it cannot start, and what to install; None when all is loaded."""
    reason = _load(CUDA_DRIVER_LIBRARY)
    if reason is not None:
        return (
            f"{_cannot_load([CUDA_DRIVER_LIBRARY], [reason])}: there is no NVIDIA driver here, or this container hides "
            "it (docker run --gpus all)"
        )
    _preload()
    reasons = {name: reason for name in CUDA_LIBRARIES if (reason := _load(name)) is not None}
    if reasons:
        problem = _cannot_load(list(reasons), list(reasons.values()))
        return f"{problem}; {_INSTALL} brings the libraries of CUDA {CUDA_MAJOR}"
    return None


def note_missing_cudnn() -> None:
    """Log that cuDNN is missing, which the provider does without."""
    if _load(_CUDNN) is not None:
        _log.info("%s is missing: attention runs without its kernels; %s brings it", _CUDNN, _INSTALL)


def installed_wheels() -> list[str]:
    """The installed distributions that hold the package onnxruntime: one, unless they lie over each other."""
    return sorted(set(importlib.metadata.packages_distributions().get("onnxruntime", [])))


def _cannot_load(names: list[str], reasons: list[str]) -> str:
    """Which libraries cannot be loaded; the loader's reasons where it is not that they are missing."""
    broken = [reason for reason in reasons if _CANNOT_OPEN not in reason]
    detail = f" ({'; '.join(broken)})" if broken else ""
    return f"{', '.join(names)} cannot be loaded{detail}"


def _preload() -> None:
    """Load the libraries of NVIDIA's wheels, which lie where no loader looks; what this prints goes to the log."""
    with _one_at_a_time, contextlib.redirect_stdout(_ThisThreadToLog(sys.stdout)):
        onnxruntime.preload_dlls(cuda=True, cudnn=True)


class _ThisThreadToLog:
    """A stdout that logs what this thread prints and passes on what the others do."""

    def __init__(self, stdout: Any) -> None:  # noqa: ANN401 - whatever the program has put there
        self._stdout = stdout
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        """Log a line of this thread."""
        if threading.get_ident() != self._thread:
            return int(self._stdout.write(text))
        if text.strip():
            _log.debug("%s", text.strip())
        return len(text)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the attributes of a stdout
        return getattr(self._stdout, name)


def _load(name: str) -> str | None:
    """Why the library cannot be loaded, in the loader's words; None when it is."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return str(error).removeprefix(f"{name}: ")
    return None
