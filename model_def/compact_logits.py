"""Rows of logits in a form small enough to ship: the largest, the log-sum-exp, a random projection of the whole row.

In: logits [N, V]. Out: `CompactRows`, and how far other logits of the same positions are from them. It runs no model.
Legend: N rows, V vocabulary, K = min(16, V) largest logits, P = 32 projections.

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

Figure = Literal["max_abs", "rms", "kl"]

_ROWS_AT_A_TIME = 64  # float64 copies of [768, 262144] logits would take gigabytes
_SMALLEST = 1e-300  # of a probability, so that its logarithm is a number


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactRows:
    """Rows of logits at `positions` int32 [N] of a text.

    `top_ids` int32 and `top_values` float32 [N, K], largest first; `log_totals` float64 [N], log-sum-exp;
    `projections` float32 [N, P] with the signs that `seed` draws.
    """

    vocab_size: int
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
        return CompactRows(vocab_size=self.vocab_size, seed=self.seed, **arrays)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; arrays as base64 of little-endian bytes."""
        arrays = {name: _encoded(getattr(self, name), dtype) for name, dtype in _DTYPES.items()}
        return {"rows": len(self.positions), "vocab_size": self.vocab_size, "seed": self.seed, **arrays}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CompactRows":
        """The rows that `to_dict` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        rows, vocab_size = int(data["rows"]), int(data["vocab_size"])
        width = {"top_ids": min(NUM_TOP, vocab_size), "top_values": min(NUM_TOP, vocab_size)}
        width["projections"] = NUM_PROJECTIONS
        arrays: dict[str, Any] = {}
        for name, dtype in _DTYPES.items():
            values = np.frombuffer(base64.b64decode(data[name], validate=True), dtype)
            shape = (rows, width[name]) if name in width else (rows,)
            arrays[name] = values.reshape(shape).astype(np.dtype(dtype).newbyteorder("="))
        if rows and not 0 <= arrays["top_ids"].min() <= arrays["top_ids"].max() < vocab_size:
            raise ValueError(f"ids of the largest logits must lie in 0 .. {vocab_size - 1}")
        return cls(vocab_size=vocab_size, seed=int(data["seed"]), **arrays)


_DTYPES = {
    "positions": "<i4",
    "top_ids": "<i4",
    "top_values": "<f4",
    "log_totals": "<f8",
    "projections": "<f4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowErrors:
    """Errors of rows of logits against a reference, each float64 [N]; what is not finite counts as infinite.

    `max_abs`: of the reference's K largest logits and of the log-sum-exp. `rms`: root mean square over the whole row,
    estimated from the projections. `kl`: KL(reference || row) in nats over the K largest and the rest taken together, a
    lower bound of the whole. `agrees` bool [N]: the best id is the reference's.
    """

    positions: NDArray[np.int32]
    max_abs: NDArray[np.float64]
    rms: NDArray[np.float64]
    kl: NDArray[np.float64]
    agrees: NDArray[np.bool_]

    def figure(self, figure: Figure) -> float:
        """The largest error of a row for "max_abs" and "rms", the mean over the rows for "kl"."""
        values: NDArray[np.float64] = getattr(self, figure)
        return float(values.mean() if figure == "kl" else values.max())

    def detail(self) -> str:
        """All figures, and where the largest error is, in words."""
        worst = int(self.max_abs.argmax())
        return (
            f"{len(self.positions)} rows; max {self.figure('max_abs'):.3g} at position {self.positions[worst]}; "
            f"rms {self.figure('rms'):.3g}; KL {self.figure('kl'):.3g}; top-1 {self.agrees.mean():.2%}"
        )


def join_errors(parts: Sequence[RowErrors]) -> RowErrors:
    """All rows of `parts`, in order."""
    names = ("positions", "max_abs", "rms", "kl", "agrees")
    return RowErrors(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def join_rows(parts: Sequence[CompactRows]) -> CompactRows:
    """All rows of `parts`, in order; they have one vocabulary and one seed."""
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _DTYPES}
    return CompactRows(vocab_size=parts[0].vocab_size, seed=parts[0].seed, **arrays)


def compact_rows(logits: NDArray[np.float32], positions: Iterable[int], *, seed: int = 0) -> CompactRows:
    """The compact form of logits [N, V] at `positions` [N]. Raises ValueError unless all are finite."""
    vocab_size = logits.shape[1]
    count = min(NUM_TOP, vocab_size)
    signs = _signs(vocab_size, seed)
    top_ids, top_values, log_totals, projections = [], [], [], []
    for part in _parts(logits):
        if not np.isfinite(part).all():
            raise ValueError("logits are not finite: they cannot serve as a reference")
        unsorted = np.argpartition(part, vocab_size - count, axis=1)[:, vocab_size - count :]
        order = np.argsort(-np.take_along_axis(part, unsorted, 1), axis=1, kind="stable")
        ids = np.take_along_axis(unsorted, order, 1)
        wide = part.astype(np.float64)
        top_ids.append(ids.astype(np.int32))
        top_values.append(np.take_along_axis(part, ids, 1))
        log_totals.append(_log_totals(wide))
        projections.append((wide @ signs).astype(np.float32))
    return CompactRows(
        vocab_size=vocab_size,
        seed=seed,
        positions=np.fromiter(positions, np.int32),
        top_ids=np.concatenate(top_ids),
        top_values=np.concatenate(top_values),
        log_totals=np.concatenate(log_totals),
        projections=np.concatenate(projections),
    )


def compare_rows(reference: CompactRows, logits: NDArray[np.float32]) -> RowErrors:
    """Errors of logits [N, V] against the reference's N rows. Raises ValueError when the shapes differ."""
    if logits.shape != (len(reference.positions), reference.vocab_size):
        raise ValueError(f"logits are {logits.shape}, needed ({len(reference.positions)}, {reference.vocab_size})")
    signs = _signs(reference.vocab_size, reference.seed)
    parts, begin = [], 0
    for part in _parts(logits):
        parts.append(_compare(reference, slice(begin, begin + len(part)), part, signs))
        begin += len(part)
    return join_errors(parts)


def _compare(reference: CompactRows, rows: slice, logits: NDArray[np.float32], signs: NDArray[np.float64]) -> RowErrors:
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite becomes infinite below
        found = np.take_along_axis(wide, reference.top_ids[rows].astype(np.intp), 1)
        wanted = reference.top_values[rows].astype(np.float64)
        totals = _log_totals(wide)
        total_errors = np.abs(totals - reference.log_totals[rows])
        max_abs = np.maximum(np.abs(found - wanted).max(axis=1), total_errors)
        gaps = wide @ signs - reference.projections[rows]
        rms = np.sqrt((gaps**2).mean(axis=1) / reference.vocab_size)
        kl = _divergences(wanted - reference.log_totals[rows][:, None], found - totals[:, None])
        agrees = wide.argmax(axis=1) == reference.top_ids[rows][:, 0]
    return RowErrors(
        positions=reference.positions[rows],
        max_abs=_finite_or_infinite(max_abs),
        rms=_finite_or_infinite(rms),
        kl=_finite_or_infinite(kl),
        agrees=agrees & np.isfinite(wide).all(axis=1),
    )


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


def _signs(vocab_size: int, seed: int) -> NDArray[np.float64]:
    """Signs [V, P]: bits of PCG64's raw output, which NumPy keeps the same in every version (NEP 19)."""
    raw = np.random.PCG64(seed).random_raw(vocab_size)
    bits = raw[:, None] >> np.arange(NUM_PROJECTIONS, dtype=np.uint64) & np.uint64(1)
    signs: NDArray[np.float64] = 1.0 - 2.0 * bits.astype(np.float64)
    return signs


def _parts(logits: NDArray[np.float32]) -> Iterable[NDArray[np.float32]]:
    return (logits[begin : begin + _ROWS_AT_A_TIME] for begin in range(0, len(logits), _ROWS_AT_A_TIME))


def _finite_or_infinite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(values), values, np.inf)


def _encoded(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")
