"""How far two models are apart: logits of the same ids, compared row by row.

In: reference and candidate logits [S, V]. Out: figures, and checks with their tolerance from one table. It runs no
model (see `graph_runner.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.certificate import Check
from graphport.model_def.conditioning import CONDITIONED_FIGURES, FloatLoss, LossFigure, explained

Logits = NDArray[np.float32]

# Largest error a stage may show, by figure. Beside each what SmolLM2-135M shows on 512 or 768 tokens of English.
# max_abs: absolute difference of logits. rms: its largest root mean square over a row. kl: mean Kullback-Leibler
# divergence to the reference in nats. Of stages in float32 the limit of an ill-conditioned model is another: see
# `model_def/conditioning.py`. Those of rounded weights and caches are what rounding may cost, whatever the model.
TOLERANCES: dict[tuple[str, str], float] = {
    ("exported", "max_abs"): 5e-4,  # 5.4e-5 (96 tokens)
    ("compiled", "max_abs"): 5e-4,  # 9.5e-5
    ("compiled", "kl"): 1e-9,  # 1.4e-11
    ("compiled", "rms"): 1e-4,  # 3.8e-5
    ("repeated", "rms"): 1e-4,  # 0: the same kernels on the same rows
    ("repeated", "kl"): 0.02,  # 3.8e-3 between one piece and single steps of one gguf bundle, whose kernels differ
    ("exact blocks", "kl"): 1e-6,  # 1.9e-11: a GGUF file's own, exact activations
    ("blocks anew", "kl"): 0.05,  # where a matrix is encoded anew at 8 bits
    ("fp16", "kl"): 1e-3,  # not measured on a GPU yet, as the next
    ("bf16", "kl"): 0.02,
    ("gguf", "kl"): 0.02,  # 2.9e-3
    ("int8", "kl"): 0.05,  # 2.0e-3
    ("int4", "kl"): 0.5,  # 0.071
    ("auto", "kl"): 0.5,  # the export holds it to --max-kl on other text
    ("int8 cache", "kl"): 0.05,  # 3.1e-3 with int8 weights,
    ("int4 cache", "kl"): 0.5,  # 0.063 with int8 weights
    ("fp8 cache", "kl"): 0.05,
}

_ROWS_AT_A_TIME = 4  # float64 copies of [4, 49152] logits stay in the processor's cache


class ParityError(ValueError):
    """A check of the certificate failed; nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFigures:
    """Candidate against reference, float64 [S] each: figures of every row, as `Difference` has them of all."""

    max_abs: NDArray[np.float64]
    rms: NDArray[np.float64]
    kl: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Candidate against reference over rows of logits.

    `worst` is (row, token id) of the largest difference; `rms` is the largest root mean square of a row; `kl` is the
    mean over rows of KL(reference || candidate) in nats; `top1` is the share of rows whose best token agrees.
    """

    max_abs: float
    mean_abs: float
    rms: float
    worst: tuple[int, int]
    kl: float
    top1: float
    rows: RowFigures = field(compare=False, repr=False)


def compare(reference: Logits, candidate: Logits) -> Difference:
    """Compare logits [S, V] of the same ids; raises ValueError when the shapes differ. NaN counts as infinite."""
    if reference.shape != candidate.shape:
        raise ValueError(f"reference logits are {reference.shape}, candidate's {candidate.shape}")
    if not reference.size:
        raise ValueError(f"logits of shape {reference.shape} hold nothing to compare")
    max_abs, worst, total, agreements = -1.0, (0, 0), 0.0, 0
    parts: list[RowFigures] = []
    for start in range(0, len(reference), _ROWS_AT_A_TIME):
        wanted, found = reference[start : start + _ROWS_AT_A_TIME], candidate[start : start + _ROWS_AT_A_TIME]
        gap, part = _gap(wanted, found)
        parts.append(part)
        row = int(part.max_abs.argmax())
        if part.max_abs[row] > max_abs:
            max_abs, worst = float(part.max_abs[row]), (start + row, int(gap[row].argmax()))
        total += float(gap.sum())
        agreements += int((wanted.argmax(axis=-1) == found.argmax(axis=-1)).sum())
    rows = _joined(parts)
    kl = float(rows.kl.mean())
    return Difference(
        max_abs=max_abs,
        mean_abs=total / reference.size,
        rms=float(rows.rms.max()),
        worst=worst,
        kl=max(kl, 0.0) if np.isfinite(kl) else float("inf"),  # rounding may end below zero
        top1=agreements / len(reference),
        rows=rows,
    )


def row_figures(reference: Logits, candidate: NDArray[np.floating[Any]]) -> RowFigures:
    """Figures of every row of logits [S, V] of the same ids."""
    starts = range(0, len(reference), _ROWS_AT_A_TIME)
    places = [slice(start, start + _ROWS_AT_A_TIME) for start in starts]
    parts = [_gap(reference[place], candidate[place])[1] for place in places]
    return _joined(parts)


def _joined(parts: Sequence[RowFigures]) -> RowFigures:
    return RowFigures(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in CONDITIONED_FIGURES})


def _gap(wanted: Logits, found: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float64], RowFigures]:
    """Absolute differences [S, V], infinite where one is not finite, and the figures of the rows."""
    with np.errstate(invalid="ignore"):  # inf - inf
        gap = found.astype(np.float64) - wanted
    kl = _divergences(wanted, gap)
    np.abs(gap, out=gap)
    if not np.isfinite(gap.sum()):
        gap[~np.isfinite(gap)] = np.inf
    rms = np.sqrt(np.einsum("sv,sv->s", gap, gap) / gap.shape[1])
    return gap, RowFigures(max_abs=gap.max(axis=1), rms=rms, kl=kl)


def _divergences(reference: Logits, gap: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL(reference || reference + gap) of every row [S] in nats: sum p (log p - log q) over the softmax of the logits.

    Computed as log sum p exp(gap - mean), mean = sum p gap: no small difference of large numbers is taken, so p may be
    float32's.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite logit gives NaN, which no tolerance admits
        p = np.exp(reference - reference.max(axis=-1, keepdims=True)).astype(np.float64)
        p /= p.sum(axis=-1, keepdims=True)
        means = np.einsum("sv,sv->s", p, gap)
        rows: NDArray[np.float64] = np.log1p(np.einsum("sv,sv->s", p, np.expm1(gap - means[:, None])))
    return rows


def check(
    stage: str,
    figure: LossFigure,
    what: str,
    difference: Difference,
    *,
    loss: Callable[[], FloatLoss] | None = None,
    rows: Sequence[int] | None = None,
) -> Check:
    """A certificate line for one figure of a stage, with the table's tolerance.

    `loss`: of a stage in float32, what float32 itself loses, asked for when the tolerance is missed; `rows`: which of
    its rows were compared, by default the first.
    """
    detail = (
        f"max {difference.max_abs:.3g} at row {difference.worst[0]}, id {difference.worst[1]}; "
        f"mean {difference.mean_abs:.3g}; KL {difference.kl:.3g}; top-1 {difference.top1:.2%}"
    )
    measured, tolerance = getattr(difference, figure), TOLERANCES[stage, figure]
    if loss is not None and not measured <= tolerance:
        errors = getattr(difference.rows, figure)
        numbers = np.arange(len(errors)) if rows is None else np.array(rows)
        nearest = loss().nearest(figure, errors, numbers, tolerance)
        detail += explained(nearest, tolerance)
        measured, tolerance = nearest.error, nearest.limit
    return Check(name=f"{stage}: {what}, {figure}", measured=measured, tolerance=tolerance, detail=detail)


def require_passed(checks: tuple[Check, ...]) -> None:
    """Raise ParityError naming every check that failed."""
    failed = [f"{c.name}: {c.measured:.4g} > {c.tolerance:.4g} ({c.detail})" for c in checks if not c.passed]
    if failed:
        raise ParityError(
            f"{len(failed)} of {len(checks)} parity checks failed: {'; '.join(failed)}. Nothing was written; a higher "
            "--precision may pass (for the cache: --kv-cache), --no-verify writes the bundle without this evidence"
        )
