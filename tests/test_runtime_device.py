"""A device that cannot be used says why, in one line with what to do; one that can says nothing."""

import importlib
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import cuda_stubs
import onnxruntime
import pytest
from tiny_bundles import write_tiny_bundle

from graphport.runtime import cuda_libraries
from graphport.runtime.cuda_libraries import CUDA_LIBRARIES, installed_wheels, library_problem
from graphport.runtime.device import (
    CUDA_DISABLED_OPTIMIZERS,
    DeviceError,
    DeviceRequest,
    choose_device,
    cuda_problem,
    open_inference_session,
)

CHECKOUT = Path(__file__).resolve().parent.parent

_PROBLEM = """
import sys
from graphport.runtime.device import cuda_problem
print(cuda_problem(int(sys.argv[1])))
"""


def problem(stubs: Path, device_id: int = 0, **machine: str) -> str:
    """What `cuda_problem` says on a machine that the stubs imitate."""
    done = cuda_stubs.run_python(stubs, _PROBLEM, str(device_id), **machine)
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    return line


@pytest.mark.parametrize(
    ("machine", "device_id", "expected"),
    [
        ({}, 0, "None"),
        ({"STUB_DEVICES": "2"}, 1, "None"),
        ({"STUB_DRIVER": "13020"}, 0, "None"),
        (
            {"STUB_DRIVER": "12020"},
            0,
            f"the NVIDIA driver is too old: it serves CUDA 12.2, onnxruntime-gpu {onnxruntime.__version__} needs 13.0; "
            "update the driver to version 580 or newer",
        ),
        (
            {"CUDA_VISIBLE_DEVICES": ""},
            0,
            "no CUDA device is visible: CUDA_VISIBLE_DEVICES is '', unset it or name a device: 0",
        ),
        ({"STUB_DEVICES": "0"}, 0, "no CUDA device is visible: CUDA_VISIBLE_DEVICES is not set"),
        ({}, 1, "device_id is 1, but there is 1 device, number 0 (CUDA_VISIBLE_DEVICES is not set)"),
        (
            {"STUB_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "4,5"},
            4,
            "device_id is 4, but there are 2 devices, numbers 0 to 1 (CUDA_VISIBLE_DEVICES is '4,5')",
        ),
        (
            {"STUB_ERROR": "999"},
            0,
            "the driver counts no devices: cudaGetDeviceCount failed with CUDA error 999: stub (CUDA_VISIBLE_DEVICES "
            "is not set)",
        ),
    ],
)
def test_b91_drivers_and_devices_that_cannot_be_used_are_told_apart(
    stubs: Path, machine: dict[str, str], device_id: int, expected: str
) -> None:
    assert problem(stubs, device_id, **machine) == expected


def test_b91_no_driver_is_told_from_missing_libraries(stubs: Path, tmp_path: Path) -> None:
    part = shutil.copytree(stubs, tmp_path / "stubs")
    for name in ("libcurand.so.10", "libcublasLt.so.13"):
        (part / name).unlink()
    assert problem(part) == (
        "libcublasLt.so.13, libcurand.so.10 cannot be loaded; pip install 'graphport[cuda]' brings the libraries of "
        "CUDA 13"
    )
    (part / "libcuda.so.1").unlink()
    assert problem(part) == (
        "libcuda.so.1 cannot be loaded: there is no NVIDIA driver here, or this container hides it (docker run "
        "--gpus all)"
    )


def test_b91_a_library_that_is_there_but_broken_is_told_from_a_missing_one(stubs: Path, tmp_path: Path) -> None:
    part = shutil.copytree(stubs, tmp_path / "stubs")
    (part / "libcublas.so.13").write_bytes(b"torn")
    path = part / "libcublas.so.13"
    assert problem(part).startswith(f"libcublas.so.13 cannot be loaded ({path}: file too short); pip install 'graph")


def test_the_libraries_asked_for_are_those_that_the_provider_links_to(stubs: Path) -> None:
    assert {path.name for path in stubs.glob("lib*")} == {*CUDA_LIBRARIES, "libcuda.so.1"}


def test_b92_a_wheel_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(cuda_libraries, "installed_wheels", lambda: ["onnxruntime"])
    assert cuda_problem() == (
        f"the installed onnxruntime {onnxruntime.__version__} was built without CUDA; do: pip uninstall onnxruntime, "
        "then pip install onnxruntime-gpu"
    )


def test_b92_wheels_installed_over_each_other_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gpu,) = installed_wheels()
    other = "onnxruntime-directml" if gpu == "onnxruntime" else "onnxruntime"
    record = tmp_path / f"{other.replace('-', '_')}-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {other}\nVersion: 1.0\n")
    (record / "top_level.txt").write_text("onnxruntime\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert installed_wheels() == sorted([gpu, other])
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    both = sorted([gpu, other])
    assert cuda_problem() == (
        f"{' and '.join(both)} are installed over each other in one folder, and what is left has no CUDA; do: pip "
        f"uninstall {' '.join(both)}, then pip install onnxruntime-gpu"
    )


class BrokenCuda:
    """An InferenceSession that lists CUDA and then runs on the CPU, or fails, as broken installations do."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __call__(self, *_: Any, providers: list[Any], enable_fallback: int, disabled_optimizers: list[str]) -> Any:
        assert enable_fallback == 0
        assert disabled_optimizers == list(CUDA_DISABLED_OPTIMIZERS)
        assert providers == [("CUDAExecutionProvider", {}), "CPUExecutionProvider"]
        if self.error is not None:
            raise self.error
        return self

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


@pytest.mark.parametrize("wheels", [["onnxruntime-gpu"], ["onnxruntime", "onnxruntime-gpu"]])
@pytest.mark.parametrize(
    ("error", "match"),
    [
        (None, "device cuda is listed but did not start{}; ONNX Runtime took CPUExecutionProvider"),
        (RuntimeError("CUDA failure 100:\n no device"), "device cuda is listed but does not start{}: CUDA failure 100"),
    ],
)
def test_b92_cuda_that_is_listed_but_broken_is_an_error_and_suspects_two_wheels(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, match: str, wheels: list[str]
) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", BrokenCuda(error))
    monkeypatch.setattr("graphport.runtime.device.installed_wheels", lambda: wheels)
    with pytest.raises(DeviceError) as raised:
        open_inference_session(Path("model.onnx"), onnxruntime.SessionOptions(), "cuda", {})
    both = " (onnxruntime and onnxruntime-gpu are installed over each other: uninstall all, then install "
    suspicion = f"{both}onnxruntime-gpu)" if len(wheels) > 1 else ""
    assert str(raised.value).startswith(match.format(suspicion))
    assert "\n" not in str(raised.value)


def test_a_graph_that_cuda_refuses_is_not_taken_for_a_broken_device(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("no kernel for NoSuchOp in /bundles/cuda/model.onnx")
    monkeypatch.setattr(onnxruntime, "InferenceSession", BrokenCuda(error))
    with pytest.raises(RuntimeError, match="no kernel for NoSuchOp"):
        open_inference_session(Path("/bundles/cuda/model.onnx"), onnxruntime.SessionOptions(), "cuda", {})


def test_what_loading_the_libraries_prints_goes_to_the_log_and_other_threads_print_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def preload(**wanted: bool) -> None:
        assert wanted == {"cuda": True, "cudnn": True}
        sys.stdout.write("Failed to load libcublas.so.13\n")
        other = threading.Thread(target=sys.stdout.write, args=("from elsewhere\n",))
        other.start()
        other.join()
        sys.stdout.flush()

    caplog.set_level("DEBUG", logger="graphport")
    monkeypatch.setattr(onnxruntime, "preload_dlls", preload)
    monkeypatch.setattr(cuda_libraries, "_load", lambda _: None)
    assert library_problem() is None
    assert capsys.readouterr() == ("from elsewhere\n", "")
    assert [record.getMessage() for record in caplog.records] == ["Failed to load libcublas.so.13"]


def test_loading_the_libraries_in_many_threads_gives_stdout_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, barrier = sys.stdout, threading.Barrier(8)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda **_: None)
    monkeypatch.setattr(cuda_libraries, "_load", lambda _: None)

    def load() -> None:
        barrier.wait()
        for _ in range(50):
            library_problem()

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.stdout is before


def test_b92_the_diagnosis_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    cuda_problem()
    assert capfd.readouterr() == ("", "")


def test_b92_opening_on_the_cpu_loads_no_cuda_library_and_no_torch(tmp_path: Path, stubs: Path) -> None:
    folder = write_tiny_bundle(tmp_path).folder
    code = "import sys, graphport.runtime as r; lm = r.load(sys.argv[1]); print(open('/proc/self/maps').read())"
    done = cuda_stubs.run_python(stubs, code, str(folder))
    assert done.returncode == 0, done.stderr
    assert "libonnxruntime" in done.stdout
    assert not [name for name in ("libcuda.so", "libcudart", "libcublas", "torch") if name in done.stdout]


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"wish": "gpu"}, ValueError, "device must be one of auto, cpu, cuda; got 'gpu'"),
        ({"device_id": -1}, ValueError, "device_id must be a whole number from 0, got -1"),
        ({"device_id": "0"}, TypeError, r"device_id must be a whole number from 0, got '0' \(str\)"),
        ({"device_id": True}, TypeError, "device_id must be a whole number from 0, got True"),
    ],
)
def test_requests_that_name_no_device_are_refused(given: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        DeviceRequest(**given)


def test_auto_follows_the_target_and_says_why_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphport.runtime.device.cuda_problem", lambda device_id: f"no device {device_id}")
    auto = DeviceRequest(device_id=3)
    assert choose_device(auto, target="cpu") == ("cpu", "the bundle was compiled for cpu")
    assert choose_device(auto, target="cuda") == ("cpu", "no device 3")
    assert choose_device(DeviceRequest(wish="cpu"), target="cuda") == ("cpu", "")
    with pytest.raises(DeviceError, match="device cuda cannot be used: no device 0; use device='cpu' to run without"):
        choose_device(DeviceRequest(wish="cuda"), target="cuda")
    monkeypatch.setattr("graphport.runtime.device.cuda_problem", lambda _: None)
    assert choose_device(auto, target="cuda") == ("cuda", "")
    assert choose_device(auto, target="cpu") == ("cpu", "the bundle was compiled for cpu")


def test_the_extra_that_messages_name_brings_what_cuda_needs() -> None:
    wheels = {
        "libcudart.so.13": "nvidia-cuda-runtime",
        "libcublas.so.13": "nvidia-cublas",
        "libcublasLt.so.13": "nvidia-cublas",
        "libcurand.so.10": "nvidia-curand",
        "libcudnn.so.9": "nvidia-cudnn-cu13",
    }
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    brought = {re.split("[>;]", requirement)[0] for requirement in project["optional-dependencies"]["cuda"]}
    assert set(CUDA_LIBRARIES) < set(wheels)
    assert set(wheels.values()) < brought


def test_b92_an_onnxruntime_that_is_left_in_part_is_told_from_a_bug(tmp_path: Path) -> None:
    """What remains when one of two wheels in one folder is uninstalled."""
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime/__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import graphport.runtime; graphport.runtime.load"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: onnxruntime is not installed, or in part (No module named 'onnxruntime.capi'); do: pip "
        "uninstall onnxruntime onnxruntime-gpu, then pip install onnxruntime-gpu"
    )
