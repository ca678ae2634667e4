"""The device of a session: the one asked for or an error that says why, "auto" with a line of what it took."""

import logging
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from fake_cuda import fake_cudart
from tiny_bundles import (
    TinyBundle,
    write_tiny_bundle,
)
from tiny_sessions import open_session

from graphport.runtime import device as device_module
from graphport.runtime.device import DeviceError, cuda_problem


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("session") / "bundle")


def test_an_unknown_device_is_refused(bundle: TinyBundle) -> None:
    with pytest.raises(ValueError, match="device must be one of auto, cpu, cuda; got 'gpu'"):
        open_session(bundle.folder, device="gpu")


def _hide_libraries(monkeypatch: pytest.MonkeyPatch, *hidden: str) -> None:
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda **_: None)
    monkeypatch.setattr(device_module, "_can_load", lambda name: name not in hidden)


@pytest.mark.parametrize("library", ["libcublas.so.13", "libcublasLt.so.13", "libcuda.so.1"])
def test_b91_cuda_that_cannot_start_is_an_error_naming_the_library(
    bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    _hide_libraries(monkeypatch, library)
    with pytest.raises(DeviceError, match=f"device cuda cannot be used: {library} .*use device='cpu'"):
        open_session(bundle.folder, device="cuda")


def test_b91_auto_says_in_one_line_what_it_took(
    tmp_path: Path, bundle: TinyBundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="graphport")
    assert open_session(bundle.folder, device="auto").device == "cpu"
    assert [record.getMessage() for record in caplog.records] == ["device auto: cpu (the bundle was compiled for cpu)"]
    caplog.clear()
    _hide_libraries(monkeypatch, "libcurand.so.10")
    folder = write_tiny_bundle(tmp_path, target="cuda").folder
    assert open_session(folder, device="auto").device == "cpu"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("device auto: cpu (libcurand.so.10 cannot be loaded; install CUDA 13")


class _BrokenCuda:
    """An InferenceSession that lists CUDA and then runs on the CPU, or fails, as broken installations do."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.real = onnxruntime.InferenceSession
        self.calls: list[list[str]] = []

    def __call__(
        self, path: str, options: Any, *, providers: list[str], provider_options: list[Any], enable_fallback: int
    ) -> Any:
        assert enable_fallback == 0
        assert len(provider_options) == len(providers)
        self.calls.append(providers)
        if "CUDAExecutionProvider" in providers and self.error is not None:
            raise self.error
        return self.real(path, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (None, "cuda is listed by ONNX Runtime but did not start; it fell back to CPUExecutionProvider"),
        (RuntimeError("CUDA failure 100: no device"), "listed by ONNX Runtime but does not start: CUDA failure 100"),
    ],
)
def test_b91_b92_cuda_that_is_listed_but_broken_is_an_error_and_auto_falls_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
    match: str,
) -> None:
    _hide_libraries(monkeypatch)
    fake_cudart(monkeypatch)
    broken = _BrokenCuda(error)
    monkeypatch.setattr(onnxruntime, "InferenceSession", broken)
    folder = write_tiny_bundle(tmp_path, target="cuda").folder
    with pytest.raises(DeviceError, match=match):
        open_session(folder, device="cuda")
    assert open_session(folder, device="auto").device == "cpu"
    assert match.rsplit(maxsplit=1)[-1] in caplog.text
    assert broken.calls[-1] == ["CPUExecutionProvider"]


def test_b92_a_wheel_without_cuda_is_told_from_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "was built without CUDA; uninstall onnxruntime and install onnxruntime-gpu" in (cuda_problem() or "")
    _hide_libraries(monkeypatch, "libcudart.so.13")
    assert (cuda_problem() or "").startswith("libcudart.so.13 cannot be loaded")
    _hide_libraries(monkeypatch)
    assert cuda_problem() is None


def test_b92_the_diagnosis_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    cuda_problem()
    assert capfd.readouterr() == ("", "")
