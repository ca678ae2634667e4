"""What a caller may ask of a session on CUDA, and what becomes of it."""

from pathlib import Path
from typing import Any

import pytest
from fake_cuda import fake_cudart
from tiny_bundles import write_tiny_bundle

from graphport.runtime import load
from graphport.runtime.cuda_runtime import CudaError, CudaRuntime
from graphport.runtime.cuda_setup import CudaSetup
from graphport.runtime.device import DeviceError
from graphport.runtime.memory import NotEnoughMemoryError

REFUSAL = RuntimeError("This session cannot use the graph capture feature as requested by the user\n as all nodes ...")


@pytest.mark.parametrize(
    ("stream", "error", "match"),
    [
        (0, ValueError, "stream=0 is the legacy default stream, on which nothing can be captured; leave it out"),
        (1, ValueError, "stream=1 is the legacy default stream"),
        (2, ValueError, "stream=2 is the default stream of a thread"),
        (-8, ValueError, "stream=-8 is no address"),
        (True, TypeError, "stream must be the address of a cudaStream_t as int, got bool"),
        ("0x7f", TypeError, "stream must be the address of a cudaStream_t as int, got str"),
    ],
)
def test_a_stream_that_is_none_is_refused(stream: Any, error: type[Exception], match: str, tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    with pytest.raises(error, match=match):
        load(tmp_path, device="cpu", stream=stream)


@pytest.mark.parametrize("wish", [1, 0, "yes", None])
def test_a_wish_for_graphs_is_true_false_or_auto(wish: Any, tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    with pytest.raises(ValueError, match="cuda_graphs must be True, False or 'auto'; got"):
        load(tmp_path, device="cpu", cuda_graphs=wish)


def test_a_stream_needs_a_session_on_cuda(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    with pytest.raises(DeviceError, match="stream need device cuda, and this session runs on the CPU"):
        load(tmp_path, device="cpu", stream=0x7F00)


def test_the_provider_gets_the_stream_and_captures_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_cudart(monkeypatch)
    own = CudaSetup(cuda_graphs="auto", stream=None)
    assert own.provider_options() == {"user_compute_stream": str(fake.streams[0]), "enable_cuda_graph": "1"}
    assert own.runtime.stream == fake.streams[0]
    given = CudaSetup(cuda_graphs=False, stream=0x7F00)
    assert given.provider_options() == {"user_compute_stream": str(0x7F00), "enable_cuda_graph": "0"}
    assert len(fake.streams) == 1


def test_a_refusal_turns_capture_off_and_other_errors_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cudart(monkeypatch)
    setup = CudaSetup(cuda_graphs="auto", stream=None)
    assert not setup.refuse(RuntimeError("CUDA failure 2: out of memory"))
    assert setup.captures
    assert setup.refuse(REFUSAL)
    assert setup.provider_options()["enable_cuda_graph"] == "0"
    assert not setup.refuse(REFUSAL)  # an answer to what was not asked
    placed = {("CUDAExecutionProvider", "MatMul"): 9, ("CPUExecutionProvider", "Loop"): 1}
    assert setup.explain_refusal(placed) == "ONNX Runtime does not capture this graph: it has 1 x Loop"
    assert setup.explain_refusal({}).startswith("This session cannot use the graph capture feature")


def test_errors_of_the_cuda_runtime_name_the_call_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_cudart(monkeypatch)
    cuda = CudaRuntime()
    fake.status = 700
    with pytest.raises(CudaError, match="cudaStreamSynchronize failed with CUDA error 700: fake error 700"):
        cuda.synchronize()
    fake.status = 2
    with pytest.raises(NotEnoughMemoryError, match=r"cudaMalloc failed with CUDA error 2: .*; lower max_length or"):
        cuda.allocate(100)
    assert fake.calls["error taken back"] == 2  # not left for ONNX Runtime to find after its next kernel
