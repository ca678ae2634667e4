"""CUDA graphs acted out on the CPU provider, as ONNX Runtime 1.31 runs them.

In: a session that has not run yet. Out: one whose decode steps are captured and replayed. The first run with a new id
executes the step three times; each further one executes what was bound then, at the addresses of then, whatever is
bound now. (Seen in the calls that the CUDA provider makes: `test_runtime_cuda_provider.py`.)
"""

from collections import Counter
from collections.abc import Hashable
from typing import Any

import numpy as np
import onnxruntime
import pytest

from graphport.runtime.decode_graphs import NO_GRAPH, DecodeGraphs
from graphport.runtime.session import Session

REGULAR_RUNS = 2  # before a capture


class ReplayedGraphs:
    """A Runner: ids `captured`, `replays` by id, `plain` runs without a graph, `batches` of the captured steps."""

    captures = True

    def __init__(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured: list[int] = []
        self.replays: Counter[int] = Counter()
        self.plain = 0
        self.batches: list[int] = []
        self._session = session._session
        self._bound: dict[int, dict[tuple[str, str], tuple[Any, ...]]] = {}
        self._graphs: dict[int, Any] = {}
        self._totals: list[np.ndarray[Any, Any]] = []
        self._ids = DecodeGraphs()
        session._runner = self
        for kind in ("bind_input", "bind_output"):
            monkeypatch.setattr(onnxruntime.IOBinding, kind, self._recorded(kind, getattr(onnxruntime.IOBinding, kind)))

    def _recorded(self, kind: str, bind: Any) -> Any:
        def record(binding: Any, name: str, *place: Any) -> None:
            self._bound.setdefault(id(binding), {})[kind, name] = place
            bind(binding, name, *place)

        return record

    def run(self, binding: Any, key: Hashable | None) -> None:
        graph_id = NO_GRAPH if key is None else self._ids.id_for(key)
        if graph_id == NO_GRAPH:
            self.plain += 1
            self._session.run_with_iobinding(binding)
        elif graph_id in self._graphs:
            self.replays[graph_id] += 1
            self._session.run_with_iobinding(self._graphs[graph_id])
        else:
            self.captured.append(graph_id)
            self._graphs[graph_id] = self._capture(binding)
            for _ in range(REGULAR_RUNS):
                self._session.run_with_iobinding(binding)
            self._session.run_with_iobinding(self._graphs[graph_id])

    def _capture(self, binding: Any) -> Any:
        """A binding of its own to the same addresses; what lies on the host counts with the value it has now."""
        copy = self._session.io_binding()
        for (kind, name), place in self._bound[id(binding)].items():
            if name == "total_sequence_length":
                address = place[-1]
                value = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int32 * 1).from_address(address)).copy()
                self._totals.append(value)
                copy.bind_input(name, *place[:-1], value.ctypes.data)
                continue
            getattr(copy, kind)(name, *place)
            if name == "input_ids":
                self.batches.append(place[3][0])
        return copy
