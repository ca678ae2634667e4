"""Rows of a model's output in a form small enough to ship: the largest, the log-sum-exp, a random projection of each.

In: rows [N, V] of logits, hidden states or vectors. Out: `CompactRows`, and how far others are from them. It runs no
model. Legend: N rows, V numbers a row, K = min(16, V) largest, P = 32 projections.

A projection is a sum over the row with signs drawn at random. An error e [V] of a row changes it by a number whose mean
square is ||e||^2, whatever the signs (Johnson-Lindenstrauss; Achlioptas 2003), so an error anywhere in the row shows.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

NUM_TOP = 16
NUM_PROJECTIONS = 32

Figure = Literal["max_abs", "rms", "kl", "relative", "cosine"]

_ROWS_AT_A_TIME = 4  # float64 copies of [4, 49152] logits stay in the processor's cache
_SMALLEST = 1e-300  # of a probability, so that its logarithm is a number


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactRows:
    """Rows of an output at `positions` int32 [N]: of a text, or of all texts or images one after the other.

    `top_ids` int32 and `top_values` float32 [N, K], largest first; `log_totals` float64 [N], log-sum-exp;
    `projections` float32 [N, P] with the signs that `seed` draws.
    """

    width: int
    seed: int
    positions: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_values: NDArray[np.float32]
    log_totals: NDArray[np.float64]
    projections: NDArray[np.float32]

    def at(self, positions: Sequence[int] | NDArray[np.integer[Any]]) -> "CompactRows":
        """The rows at these positions, in this order. Raises ValueError for one that is not there."""
        where = {int(position): row for row, position in enumerate(self.positions)}
        missing = [int(position) for position in positions if int(position) not in where]
        if missing:
            raise ValueError(f"no reference row at position {missing[0]}; there are {len(where)}")
        return self.slice(np.array([where[int(position)] for position in positions], np.intp))

    def slice(self, rows: slice | NDArray[np.intp]) -> "CompactRows":
        """Some of the rows, by number."""
        arrays = {name: getattr(self, name)[rows] for name in _DTYPES}
        return CompactRows(width=self.width, seed=self.seed, **arrays)

    @property
    def scale(self) -> float:
        """Root mean square of all numbers of the rows, as their projections estimate it."""
        squares = self.projections.astype(np.float64) ** 2
        return float(np.sqrt(squares.mean() / self.width)) if squares.size else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; arrays as base64 of little-endian bytes."""
        arrays = {name: _encoded(getattr(self, name), dtype) for name, dtype in _DTYPES.items()}
        return {"rows": len(self.positions), "width": self.width, "seed": self.seed, **arrays}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CompactRows":
        """The rows that `to_dict` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        rows, width = int(data["rows"]), int(data["width"])
        widths = {"top_ids": min(NUM_TOP, width), "top_values": min(NUM_TOP, width)}
        widths["projections"] = NUM_PROJECTIONS
        arrays: dict[str, Any] = {}
        for name, dtype in _DTYPES.items():
            values = np.frombuffer(base64.b64decode(data[name], validate=True), dtype)
            shape = (rows, widths[name]) if name in widths else (rows,)
            arrays[name] = values.reshape(shape).astype(np.dtype(dtype).newbyteorder("="))
        if rows and not 0 <= arrays["top_ids"].min() <= arrays["top_ids"].max() < width:
            raise ValueError(f"ids of the largest logits must lie in 0 .. {width - 1}")
        return cls(width=width, seed=int(data["seed"]), **arrays)


_DTYPES = {
    "positions": "<i4",
    "top_ids": "<i4",
    "top_values": "<f4",
    "log_totals": "<f8",
    "projections": "<f4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowErrors:
    """Errors of rows against a reference, each float64 [N]; what is not finite counts as infinite.

    `max_abs`: of the reference's K largest numbers and of the log-sum-exp. `rms`: root mean square over the whole row,
    estimated from the projections. `kl`: of logits, KL(reference || row) in nats over the K largest and the rest taken
    together, a lower bound of the whole. `relative`: `rms` to that of all reference rows. `cosine`: 1 - cosine, from
    the projections. `agrees` bool [N]: the largest is where the reference's is.
    """

    positions: NDArray[np.int32]
    max_abs: NDArray[np.float64]
    rms: NDArray[np.float64]
    kl: NDArray[np.float64]
    relative: NDArray[np.float64]
    cosine: NDArray[np.float64]
    agrees: NDArray[np.bool_]

    def figure(self, figure: Figure) -> float:
        """The largest error of a row, but for "kl" the mean over the rows."""
        values: NDArray[np.float64] = getattr(self, figure)
        return float(values.mean() if figure == "kl" else values.max())

    def detail(self) -> str:
        """All figures, and where the largest error is, in words."""
        worst = int(self.max_abs.argmax())
        return (
            f"{len(self.positions)} rows; max {self.figure('max_abs'):.3g} at position {self.positions[worst]}; "
            f"rms {self.figure('rms'):.3g}, relative {self.figure('relative'):.3g}; KL {self.figure('kl'):.3g}; "
            f"1 - cosine {self.figure('cosine'):.3g}; top-1 {self.agrees.mean():.2%}"
        )


def join_errors(parts: Sequence[RowErrors]) -> RowErrors:
    """All rows of `parts`, in order."""
    names = ("positions", "max_abs", "rms", "kl", "relative", "cosine", "agrees")
    return RowErrors(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def join_rows(parts: Sequence[CompactRows]) -> CompactRows:
    """All rows of `parts`, in order; they have one width and one seed."""
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _DTYPES}
    return CompactRows(width=parts[0].width, seed=parts[0].seed, **arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRows:
    """Whole rows float32 [N, V], with what is summed over each once: float64 log-sum-exp [N] and projections [N, P]."""

    rows: NDArray[np.float32]
    seed: int
    log_totals: NDArray[np.float64]
    projections: NDArray[np.float64]


def measure_rows(rows: NDArray[np.float32], *, seed: int) -> MeasuredRows:
    """Sum over `rows` [N, V], with the signs that `seed` draws; what is not finite shows in the sums."""
    signs = _signs(rows.shape[1], seed)
    log_totals, projections = [np.empty(0)], [np.empty((0, NUM_PROJECTIONS))]
    with np.errstate(invalid="ignore", over="ignore"):
        for begin in range(0, len(rows), _ROWS_AT_A_TIME):
            wide = rows[begin : begin + _ROWS_AT_A_TIME].astype(np.float64)
            projections.append(wide @ signs)
            log_totals.append(_log_totals(wide))
    return MeasuredRows(
        rows=rows, seed=seed, log_totals=np.concatenate(log_totals), projections=np.concatenate(projections)
    )


def compact_rows(measured: MeasuredRows, positions: Iterable[int]) -> CompactRows:
    """The compact form of rows at `positions` [N]. Raises ValueError unless all are finite."""
    rows = measured.rows
    width = rows.shape[1]
    count = min(NUM_TOP, width)
    if not np.isfinite(rows).all():
        raise ValueError("the rows are not finite: they cannot serve as a reference")
    top_ids = [np.empty((0, count), np.int32)]
    for begin in range(0, len(rows), _ROWS_AT_A_TIME):
        part = rows[begin : begin + _ROWS_AT_A_TIME]
        unsorted = np.argpartition(part, width - count, axis=1)[:, width - count :]
        order = np.argsort(-np.take_along_axis(part, unsorted, 1), axis=1, kind="stable")
        top_ids.append(np.take_along_axis(unsorted, order, 1).astype(np.int32))
    ids = np.concatenate(top_ids)
    return CompactRows(
        width=width,
        seed=measured.seed,
        positions=np.fromiter(positions, np.int32),
        top_ids=ids,
        top_values=np.take_along_axis(rows, ids.astype(np.intp), 1),
        log_totals=measured.log_totals,
        projections=measured.projections.astype(np.float32),
    )


def compare_rows(reference: CompactRows, measured: MeasuredRows, *, scale: float | None = None) -> RowErrors:
    """Errors of rows [N, V] against the reference's N rows; `scale`: of more rows than these, for "relative".

    Raises ValueError when shapes or signs differ.
    """
    rows = measured.rows
    if rows.shape != (len(reference.positions), reference.width) or measured.seed != reference.seed:
        raise ValueError(
            f"rows are {rows.shape} with seed {measured.seed}, needed ({len(reference.positions)}, {reference.width}) "
            f"with {reference.seed}"
        )
    wanted = reference.top_values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite becomes infinite below
        found = np.take_along_axis(rows, reference.top_ids.astype(np.intp), 1).astype(np.float64)
        total_errors = np.abs(measured.log_totals - reference.log_totals)
        max_abs = np.maximum(np.abs(found - wanted).max(axis=1), total_errors)
        # rounded as the reference's are: equal rows differ by nothing, however large they are
        gaps = measured.projections.astype(np.float32) - reference.projections.astype(np.float64)
        rms = np.sqrt((gaps**2).mean(axis=1) / reference.width)
        log_p = wanted - reference.log_totals[:, None]
        kl = _divergences(log_p, found - measured.log_totals[:, None])
        agrees = rows.argmax(axis=1) == reference.top_ids[:, 0]
        cosine = _cosine_distances(reference.projections.astype(np.float64), measured.projections)
        relative = rms / max(reference.scale if scale is None else scale, _SMALLEST)
    return RowErrors(
        positions=reference.positions,
        max_abs=_finite_or_infinite(max_abs),
        rms=_finite_or_infinite(rms),
        kl=_finite_or_infinite(kl),
        relative=_finite_or_infinite(relative),
        cosine=_finite_or_infinite(cosine),
        agrees=agrees & np.isfinite(measured.projections).all(axis=1),
    )


def _cosine_distances(wanted: NDArray[np.float64], found: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 - cosine [N] of rows [N, P]; of rows of zeros 0 if both are, else 1."""
    norms = np.linalg.norm(wanted, axis=1) * np.linalg.norm(found, axis=1)
    both_zero = ~wanted.any(axis=1) & ~found.any(axis=1)
    cosines = np.where(both_zero, 1.0, (wanted * found).sum(axis=1) / np.where(norms == 0, 1.0, norms))
    distances: NDArray[np.float64] = 1.0 - np.minimum(cosines, 1.0)
    return distances


def _divergences(log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL(p || q) [N] over K outcomes [N, K] and one that stands for all others."""
    p, q = np.exp(log_p), np.exp(log_q)
    rest_p, rest_q = np.clip(1 - p.sum(axis=1), 0, None), np.clip(1 - q.sum(axis=1), _SMALLEST, None)
    rest = rest_p * np.log(np.clip(rest_p, _SMALLEST, None) / rest_q)
    rows: NDArray[np.float64] = np.clip((p * (log_p - log_q)).sum(axis=1) + rest, 0, None)
    return rows


def _log_totals(wide: NDArray[np.float64]) -> NDArray[np.float64]:
    largest = wide.max(axis=1, keepdims=True)
    totals: NDArray[np.float64] = largest[:, 0] + np.log(np.exp(wide - largest).sum(axis=1))
    return totals


def _signs(width: int, seed: int) -> NDArray[np.float64]:
    """Signs [V, P]: bits of PCG64's raw output, which NumPy keeps the same in every version (NEP 19)."""
    raw = np.random.PCG64(seed).random_raw(width)
    bits = raw[:, None] >> np.arange(NUM_PROJECTIONS, dtype=np.uint64) & np.uint64(1)
    signs: NDArray[np.float64] = 1.0 - 2.0 * bits.astype(np.float64)
    return signs


def _finite_or_infinite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(values), values, np.inf)


def _encoded(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")
