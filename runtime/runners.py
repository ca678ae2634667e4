"""Runs a bound step: on the CPU as it is, on CUDA on one stream, replayed as a captured graph where that is asked for.

In: a binding, and what a captured graph of it would hold. Out: nothing; results are where the binding says. It binds
and plans nothing (see `session.py`).
"""

import logging
from collections.abc import Hashable
from typing import Any, Protocol

import onnxruntime

from graphport.runtime.cuda_setup import CudaSetup
from graphport.runtime.decode_graphs import NO_GRAPH, DecodeGraphs
from graphport.runtime.device import ORT_ERRORS, DeviceError
from graphport.runtime.run_thread import RunThread

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs bindings; `captures` says whether steps with a key are replayed as graphs."""

    captures: bool

    def run(self, binding: Any, key: Hashable | None) -> None:  # noqa: ANN401 - ORT is untyped
        """Run `binding`; with a `key`, as the graph that was captured under it, or capture that now."""


class CpuRunner:
    """Runs on the CPU provider."""

    captures = False

    def __init__(self, session: Any) -> None:  # noqa: ANN401 - ORT is untyped
        self._session = session

    def run(self, binding: Any, key: Hashable | None) -> None:  # noqa: ANN401, ARG002 - see Runner
        """See Runner."""
        self._session.run_with_iobinding(binding)


class CudaRunner:
    """Runs on the CUDA provider and returns before the device is done."""

    def __init__(self, session: Any, setup: CudaSetup) -> None:  # noqa: ANN401 - ORT is untyped
        self.captures = setup.captures
        self._is_required = setup.is_required
        self._session = session
        self._graphs = DecodeGraphs()
        self._thread = RunThread() if setup.captures else None
        self._options: dict[int, Any] = {}

    def run(self, binding: Any, key: Hashable | None) -> None:  # noqa: ANN401 - ORT is untyped
        """See Runner. A first capture that fails ends capturing: an error if it was required, else a warning."""
        graph = self._graphs.id_for(key) if self.captures and key is not None else NO_GRAPH
        is_first = graph != NO_GRAPH and graph not in self._options
        try:
            self._run(binding, graph)
        except ORT_ERRORS as error:
            if not is_first:
                raise
            self._give_up(error)
            self._run(binding, NO_GRAPH)

    def _run(self, binding: Any, graph: int) -> None:  # noqa: ANN401 - ORT is untyped
        options = self._options.get(graph)
        if options is None:
            options = _run_options(graph)
        if self._thread is None:
            self._session.run_with_iobinding(binding, options)
        else:  # for good: every thread that runs a session opened for capture keeps a context of it
            self._thread(lambda: self._session.run_with_iobinding(binding, options))
        self._options[graph] = options

    def _give_up(self, error: Exception) -> None:
        words = " ".join(str(error).split())
        if self._is_required:
            raise DeviceError(
                f"cuda_graphs=True was asked for, and capturing a decode step failed: {words}; use cuda_graphs=False"
            ) from error
        _log.warning("capturing a decode step failed: %s; decode steps run without CUDA graphs from here on", words)
        self.captures = False


def _run_options(graph: int) -> Any:  # noqa: ANN401 - ORT is untyped
    """Options of a run that replays `graph`, and that does not wait for the device."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options
