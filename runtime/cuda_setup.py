"""What a session on CUDA is opened with: the stream it runs on, and whether it captures graphs.

In: the caller's wishes. Out: options of ONNX Runtime's CUDA provider, the runtime of the stream, and the reason when
capture was refused. It opens no session (see `opening.py`).
"""

from collections.abc import Mapping
from typing import Literal

from graphport.runtime.cuda_runtime import CudaRuntime

GraphWish = bool | Literal["auto"]

# ONNX Runtime names no node when it refuses: these are the ops that it cannot capture anywhere.
_CONTROL_FLOW = ("If", "Loop", "Scan")

_DEFAULT_STREAMS = {0: "the legacy default stream", 1: "the legacy default stream", 2: "the default stream of a thread"}


class CudaSetup:
    """The caller's wishes, and after opening what became of them.

    Attributes: `captures`, whether decode steps are captured; `refusal`, ONNX Runtime's words if it refused to.
    """

    def __init__(self, *, cuda_graphs: GraphWish, stream: int | None, device_id: int = 0) -> None:
        self.captures = _checked_wish(cuda_graphs) is not False
        self.is_required = cuda_graphs is True
        self.stream = _checked_stream(stream)
        self.device_id = device_id
        self.refusal: str | None = None
        self._runtime: CudaRuntime | None = None

    @property
    def has_wishes(self) -> bool:
        """Whether the caller asked for something that only CUDA has."""
        return self.is_required or self.stream is not None

    @property
    def runtime(self) -> CudaRuntime:
        """The CUDA runtime with the session's stream; made when first asked for, after its library can be found."""
        if self._runtime is None:
            self._runtime = CudaRuntime(device_id=self.device_id, stream=self.stream)
        return self._runtime

    def provider_options(self) -> dict[str, str]:
        """The stream, and capture unless it is off or has been refused."""
        return {
            "user_compute_stream": str(self.runtime.stream),
            "enable_cuda_graph": str(int(self.captures)),
        }

    def refuse(self, error: BaseException) -> bool:
        """Whether `error` is ONNX Runtime's refusal to capture; then capture is off from here on."""
        if not self.captures or "graph capture" not in str(error):
            return False
        self.captures, self.refusal = False, " ".join(str(error).split())
        return True

    def explain_refusal(self, placement: Mapping[tuple[str, str], int]) -> str:
        """Why capture was refused, with the nodes to blame among those of `placement` (provider, op)."""
        blamed = [f"{count} x {op}" for (_, op), count in sorted(placement.items()) if op in _CONTROL_FLOW]
        return f"ONNX Runtime does not capture this graph: it has {', '.join(blamed)}" if blamed else str(self.refusal)


def _checked_wish(cuda_graphs: GraphWish) -> GraphWish:
    if cuda_graphs is True or cuda_graphs is False or cuda_graphs == "auto":
        return cuda_graphs
    raise ValueError(f"cuda_graphs must be True, False or 'auto'; got {cuda_graphs!r}")


def _checked_stream(stream: int | None) -> int | None:
    if stream is None:
        return None
    if isinstance(stream, bool) or not isinstance(stream, int):
        raise TypeError(f"stream must be the address of a cudaStream_t as int, got {type(stream).__name__}")
    if stream in _DEFAULT_STREAMS or stream < 0:
        what = _DEFAULT_STREAMS.get(stream, "no address")
        raise ValueError(
            f"stream={stream} is {what}, on which nothing can be captured; leave it out: the session's own stream is "
            "ordered with the legacy default stream"
        )
    return stream
