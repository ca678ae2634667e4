"""Steps of one token through an ONNX Runtime session, over a cache filled with seeded numbers: see `decode_step.py`.

In: a session of a decoder's graph. Out: milliseconds a step, and logits. Past and present are one buffer, as in
`graphport.runtime`; the same token is run again and again at one place, so a step never changes the length.
"""

import os
import time
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from peer_process import CpuTimes, PeerError

from graphport.model_def.signature import (
    INPUT_IDS,
    LOGITS,
    LOGITS_ROWS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    unmoved_windows,
)

_TOLERANCE = 0.05  # of the largest logit: one place of a rounded cache or activation more or less, a fault gives 1
_CACHES = {"tensor(float)": np.float32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}


class StepRun:
    """A session with its cache of `max_context` tokens and one more."""

    def __init__(self, session: Any, *, max_context: int) -> None:  # noqa: ANN401 - ORT is untyped
        self._session = session
        self._binding = session.io_binding()
        random = np.random.default_rng(0)
        present = {value.name.replace("present", "past_key_values"): value.name for value in session.get_outputs()}
        for value in session.get_inputs():
            if value.name in present:
                shape = (1, value.shape[1], max_context + 1, value.shape[3])
                numbers = random.integers(-20, 20, shape).astype(_CACHES[value.type])
                buffer = onnxruntime.OrtValue.ortvalue_from_numpy(numbers)
                self._binding.bind_ortvalue_input(value.name, buffer)
                self._binding.bind_ortvalue_output(present[value.name], buffer)
        self._binding.bind_output(LOGITS, "cpu")

    def logits(self, context: int) -> NDArray[np.float32]:
        """Of one token after `context` others, flat."""
        self._place(context)
        self._session.run_with_iobinding(self._binding)
        return np.asarray(self._binding.copy_outputs_to_cpu()[0]).ravel()

    def times(self, context: int, steps: int) -> list[float]:
        """Milliseconds of each of `steps` steps."""
        self._place(context)
        spent = []
        for _ in range(steps):
            begin = time.perf_counter()
            self._session.run_with_iobinding(self._binding)
            spent.append((time.perf_counter() - begin) * 1000)
        return spent

    def timed(self, context: int, steps: int) -> tuple[list[float], float]:
        """`times`, and the share of the CPU that other processes took meanwhile."""
        before = CpuTimes.now(os.getpid())
        spent = self.times(context, steps)
        return spent, CpuTimes.now(os.getpid()).others_since(before)

    def require_like(self, other: "StepRun", context: int) -> None:
        """Raises PeerError unless both compute the same logits over the same cache."""
        ours, theirs = self.logits(context), other.logits(context)
        difference, largest = float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())
        if not difference <= _TOLERANCE * largest:
            raise PeerError(f"logits differ by {difference:.3g}, the largest is {largest:.3g}: the prototype is wrong")

    def _place(self, context: int) -> None:
        feeds = {
            INPUT_IDS: np.array([[7]], np.int64),
            SEQLENS_K: np.array([context], np.int32),
            TOTAL_SEQUENCE_LENGTH: np.array(context + 1, np.int32),
            LOGITS_ROWS: np.array([0], np.int64),
        }
        names = {node.name for node in self._session.get_inputs()}
        feeds |= unmoved_windows(names, feeds[SEQLENS_K], feeds[TOTAL_SEQUENCE_LENGTH])
        for name, value in feeds.items():
            self._binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value))
