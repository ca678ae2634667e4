"""Steps of a decoder's graph through an ONNX Runtime session: see `step_times.py`.

In: a session, and work: a decode step of some rows over a cache filled with seeded numbers, or a prompt in the chunks
that the engine cuts. Out: milliseconds, and logits. Past and present are one buffer, as in `graphport.runtime`; work
that is done again writes the same places, so lengths never change.
"""

import os
import time
from dataclasses import dataclass
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

# Before a measurement: threads of another session look for work for 40 ms after its last run, on a core each.
REST_S = 0.06

# Element types, and what a seeded number up to 20 is times: float keys of 20 would leave a row to one other alone.
_CACHES = {"tensor(float)": (np.float32, 0.05), "tensor(int8)": (np.int8, 1), "tensor(uint8)": (np.uint8, 1)}
_LEAST_VOCABULARY = 32
_FILL = 256  # tokens of a row at once that fill a cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`new` tokens of every row, `cached` before them; logits of the last of them, or of none."""

    new: int
    cached: int
    has_logits: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Steps of `rows` rows, timed together. `what` names them in a table; `repeats` is how often a round does them."""

    what: str
    rows: int
    repeats: int
    steps: tuple[Step, ...]

    @property
    def capacity(self) -> int:
        """Tokens that a row's cache must hold."""
        return max(step.cached + step.new for step in self.steps)


def decoding(cached: int, *, rows: int = 1, repeats: int = 24, what: str | None = None) -> Work:
    """One new token a row after `cached` others."""
    step = Step(new=1, cached=cached)
    return Work(what=what or f"after {cached}", rows=rows, repeats=repeats, steps=(step,))


def prompt(length: int, *, chunk: int) -> Work:
    """A prompt of one row in chunks."""
    steps = [
        Step(new=min(chunk, length - begin), cached=begin, has_logits=begin + chunk >= length)
        for begin in range(0, length, chunk)
    ]
    return Work(what=f"prompt of {length}", rows=1, repeats=max(1, 512 // length), steps=tuple(steps))


class StepRun:
    """A session with caches of `capacity` tokens for `rows` rows."""

    def __init__(self, session: Any, *, rows: int, capacity: int) -> None:  # noqa: ANN401 - ORT is untyped
        self._session, self._rows = session, rows
        self._bindings: dict[Step, Any] = {}
        self._inputs = {value.name for value in session.get_inputs()}
        random = np.random.default_rng(0)
        present = {value.name.replace("present", "past_key_values"): value.name for value in session.get_outputs()}
        self._caches = []
        for value in session.get_inputs():
            if value.name in present:
                shape = (rows, value.shape[1], capacity, value.shape[3])
                kind, unit = _CACHES[value.type]
                numbers = (random.integers(-20, 20, shape) * unit).astype(kind)
                buffer = onnxruntime.OrtValue.ortvalue_from_numpy(numbers)
                self._caches.append((value.name, present[value.name], buffer))

    def logits(self, work: Work) -> NDArray[np.float32]:
        """Of the work's last step, one row after the other, flat."""
        for step in work.steps:
            self._run(step)
        return np.asarray(self._bound(work.steps[-1]).copy_outputs_to_cpu()[0]).ravel()

    def times(self, work: Work) -> list[float]:
        """Milliseconds of each repeat of the work."""
        for step in work.steps:
            self._bound(step)
        time.sleep(REST_S)
        spent = []
        for _ in range(work.repeats):
            begin = time.perf_counter()
            for step in work.steps:
                self._run(step)
            spent.append((time.perf_counter() - begin) * 1000)
        return spent

    def require_like(self, other: "StepRun", work: Work, *, tolerance: float) -> None:
        """Raises PeerError unless both compute the same logits, but for `tolerance` times the largest.

        What is cached before is a prompt that `other` has read: over senseless numbers a rounding grows without bounds.
        """
        cached = work.steps[0].cached
        for step in prompt(cached, chunk=_FILL).steps if cached else ():
            other._run(step)
        for (_, _, own), (_, _, filled) in zip(self._caches, other._caches, strict=True):
            own.update_inplace(filled.numpy())
        ours, theirs = self.logits(work), other.logits(work)
        difference, largest = float(np.abs(ours - theirs).max()), float(np.abs(theirs).max())
        if not difference <= tolerance * largest:
            raise PeerError(
                f"{work.what}: logits differ by {difference:.3g}, the largest is {largest:.3g}: the prototype is wrong"
            )

    def _run(self, step: Step) -> None:
        self._session.run_with_iobinding(self._bound(step))

    def _bound(self, step: Step) -> Any:  # noqa: ANN401 - ORT is untyped
        if step not in self._bindings:
            self._bindings[step] = self._bind(step)
        return self._bindings[step]

    def _bind(self, step: Step) -> Any:  # noqa: ANN401 - ORT is untyped
        total, random = step.cached + step.new, np.random.default_rng(step.cached)
        asked = np.arange(1, self._rows + 1) * step.new - 1 if step.has_logits else np.array([], np.int64)
        feeds = {
            INPUT_IDS: random.integers(_LEAST_VOCABULARY, size=(self._rows, step.new)),
            SEQLENS_K: np.full(self._rows, total - 1, np.int32),
            TOTAL_SEQUENCE_LENGTH: np.array(total, np.int32),
            LOGITS_ROWS: asked,
        }
        feeds |= unmoved_windows(self._inputs, feeds[SEQLENS_K], feeds[TOTAL_SEQUENCE_LENGTH])
        binding = self._session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(value))
        binding.bind_output(LOGITS, "cpu")
        for past, present, buffer in self._caches:
            binding.bind_ortvalue_input(past, buffer)
            binding.bind_ortvalue_output(present, buffer)
        return binding


def timed(runs: dict[int, StepRun], works: tuple[Work, ...]) -> tuple[dict[str, list[float]], float]:
    """Times of each work on the run with as many rows; the share of the CPU that other processes took meanwhile."""
    before = CpuTimes.now(os.getpid())
    spent = {work.what: runs[work.rows].times(work) for work in works}
    return spent, CpuTimes.now(os.getpid()).others_since(before)
