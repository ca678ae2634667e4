"""Playing the runs of a certificate: each gives rows of an output, which are compared with reference rows as they come.

In: runs over a model of any kind, reference rows. Out: checks, errors a row, rows to ship. What is fed is said by
`decoder_runs.py` and `encoder_runs.py`; it opens no graph: the exporter and the runtime bring their own.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.certificate import Against, Check, Limit
from graphport.model_def.compact_rows import (
    CompactRows,
    RowErrors,
    compact_rows,
    compare_rows,
    join_errors,
    join_rows,
    measure_rows,
)
from graphport.model_def.conditioning import FloatLoss, LossFigure, explained

ROW_BYTES = 1 << 26  # of float32 rows that are compared together

_WORDS: dict[Against, str] = {"original": "eager PyTorch", "shipped": "itself as exported"}

Rows = NDArray[np.float32]
Emit = Callable[[Sequence[int], Rows], None]  # numbers of reference rows, and what was found for them
Model = TypeVar("Model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Generic[Model]):
    """One way to feed a model: its name in checks, what is fed in words, the output that is compared, the feeding."""

    name: str
    inputs: str
    output: str
    play: Callable[[Model, Emit], None]

    def watched(self, watch: Emit) -> "Run[Model]":
        """The same, whose rows are shown to `watch` too."""

        def play(model: Model, emit: Emit) -> None:
            def show(positions: Sequence[int], rows: Rows) -> None:
                watch(positions, rows)
                emit(positions, rows)

            self.play(model, show)

        return dataclasses.replace(self, play=play)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What runs showed: checks, and by run the errors against the original and the rows themselves."""

    checks: tuple[Check, ...]
    errors: Mapping[str, RowErrors]
    rows: Mapping[str, CompactRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What runs are held to: rows of the original by output, the bundle's own by run, and limits.

    Limits against the bundle's own rows apply where there are any. `keep_rows` makes those anew, to ship. `loss`: what
    float32 loses on the rows of an output, asked for when a limit that allows for it is missed; None if that is not
    known.
    """

    original: Mapping[str, CompactRows]
    shipped: Mapping[str, CompactRows] = field(default_factory=dict)
    limits: Sequence[Limit]
    keep_rows: bool = False
    loss: Callable[[str], FloatLoss | None] = lambda _: None


def play_runs(
    model: Model,
    runs: Sequence[Run[Model]],
    references: References,
    *,
    observe: Callable[[str], None] = lambda _: None,
) -> Evidence:
    """Play `runs` and hold their rows to `references`. Raises ValueError when they do not fit."""
    checks: list[Check] = []
    errors: dict[str, RowErrors] = {}
    kept: dict[str, CompactRows] = {}
    for run in runs:
        observe(run.name)
        if run.output not in references.original:
            raise ValueError(f"the certificate has no rows of {run.output}, which the run {run.name!r} gives")
        comparison = _Comparison(
            original=references.original[run.output],
            shipped=references.shipped.get(run.name),
            keep_rows=references.keep_rows,
        )
        run.play(model, comparison.take)
        found = comparison.results()
        errors[run.name] = found["original"]
        if references.keep_rows:
            kept[run.name] = comparison.rows()
        checks += [
            _check(run, found[limit.against], limit, references.loss)
            for limit in references.limits
            if limit.against in found and limit.output in (None, run.output)
        ]
    return Evidence(checks=tuple(checks), errors=errors, rows=kept)


def _check(run: Run[Model], errors: RowErrors, limit: Limit, loss_of: Callable[[str], FloatLoss | None]) -> Check:
    measured, tolerance, detail = errors.figure(limit.figure), limit.tolerance, errors.detail()
    loss = loss_of(run.output) if limit.conditioned and not measured <= tolerance else None
    if loss is not None:
        figure = cast("LossFigure", limit.figure)
        nearest = loss.nearest(figure, getattr(errors, figure), errors.positions, tolerance)
        measured, tolerance, detail = nearest.error, nearest.limit, detail + explained(nearest, tolerance)
    return Check(
        name=f"{run.name}: {limit.figure} against {_WORDS[limit.against]}",
        measured=measured,
        tolerance=tolerance,
        detail=detail,
        inputs=run.inputs,
    )


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """Compares rows as they come, some at a time: what is drawn and summed over a row serves all comparisons."""

    original: CompactRows
    shipped: CompactRows | None
    keep_rows: bool
    _positions: list[int] = field(default_factory=list)
    _waiting: list[Rows] = field(default_factory=list)
    _errors: dict[Against, list[RowErrors]] = field(default_factory=lambda: {"original": [], "shipped": []})
    _kept: list[CompactRows] = field(default_factory=list)
    _num_done: int = 0

    def take(self, positions: Sequence[int], rows: Rows) -> None:
        self._positions += positions
        self._waiting.append(rows.copy())
        if sum(part.nbytes for part in self._waiting) >= ROW_BYTES:
            self._flush()

    def results(self) -> dict[Against, RowErrors]:
        self._flush()
        if self.shipped is not None and len(self.shipped.positions) != self._num_done:
            raise ValueError(f"{len(self.shipped.positions)} rows were shipped for a run of {self._num_done}")
        return {against: join_errors(parts) for against, parts in self._errors.items() if parts}

    def rows(self) -> CompactRows:
        return join_rows(self._kept)

    def _flush(self) -> None:
        if not self._waiting:
            return
        measured = measure_rows(np.concatenate(self._waiting), seed=self.original.seed)
        scale = self.original.scale
        self._errors["original"].append(compare_rows(self.original.at(self._positions), measured, scale=scale))
        if self.shipped is not None:
            self._errors["shipped"].append(compare_rows(self._next_shipped(self.shipped), measured, scale=scale))
        if self.keep_rows:
            self._kept.append(compact_rows(measured, self._positions))
        self._num_done += len(self._positions)
        self._positions, self._waiting = [], []

    def _next_shipped(self, shipped: CompactRows) -> CompactRows:
        rows = slice(self._num_done, self._num_done + len(self._positions))
        if shipped.positions[rows].tolist() != self._positions:
            raise ValueError("the rows that were shipped are those of another run")
        return shipped.slice(rows)


def listed(numbers: Sequence[int]) -> str:
    """`1, 7 and 64`; equal neighbours are counted."""
    groups = [[numbers[0], 1]]
    for before, number in pairwise(numbers):
        if number == before:
            groups[-1][1] += 1
        else:
            groups.append([number, 1])
    words = [f"{number}" if count == 1 else f"{count} x {number}" for number, count in groups]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def spread(length: int, budget: int) -> NDArray[np.int64]:
    """At most `budget` positions below `length`, evenly spread, the last among them."""
    if length <= budget:
        return np.arange(length)
    return np.unique(np.linspace(0, length - 1, budget).astype(np.int64))
