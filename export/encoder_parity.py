"""How far two encoders are apart on the same texts, and the checks made of it.

In: reference and candidate states. Out: figures, checks with their tolerance from one table. It runs no
model (see `encoder_runner.py`).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphport.export.encoder_runner import States
from graphport.model_def.certificate import Check

# Largest error a stage may show, by figure of `StateDifference`. Beside each the error measured for all-MiniLM-L6-v2 on
# texts of 1 to 128 tokens.
STATE_TOLERANCES: dict[tuple[str, str], float] = {
    ("exported", "relative"): 5e-5,  # 3.9e-7
    ("compiled", "relative"): 5e-5,  # 5.2e-7
    ("int8", "cosine"): 0.01,  # 7.5e-4
    ("int4", "cosine"): 0.1,  # 0.041
    ("neighbours", "relative"): 5e-5,  # 1.9e-8
    ("neighbours", "cosine"): 1e-3,  # 1.7e-4 in int4: the kernels for one row round otherwise than those for many
    ("fp16", "cosine"): 1e-3,  # not measured on a GPU yet, as the next
    ("bf16", "cosine"): 0.01,
    ("repeated", "relative"): 1e-5,  # 0: the same kernels on the same rows
    ("repeated", "cosine"): 0.005,  # of a rounded model: kernels of another processor round other activations
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """Candidate against reference.

    `relative`: largest difference of a hidden state, embedding or logit, to the reference's largest; `worst` is the
    text and token where (token -1: what is read out). `cosine`: largest 1 - cosine of a text's embedding or logits or,
    without either, the hidden states of all its tokens.
    """

    relative: float
    worst: tuple[int, int]
    cosine: float


def compare_states(reference: States, candidate: States) -> StateDifference:
    """Compare states of the same texts; what is not finite is infinitely far."""
    relative, worst, cosine = 0.0, (0, 0), 0.0
    scale = max(float(np.abs(states).max()) for states in reference.hidden)
    for text, (wanted, found) in enumerate(zip(reference.hidden, candidate.hidden, strict=True)):
        gaps = _gaps(wanted, found).max(axis=-1) / scale  # [S]
        token = int(gaps.argmax())
        if gaps[token] > relative:
            relative, worst = float(gaps[token]), (text, token)
        if reference.read_out is None:
            cosine = max(cosine, _cosine_distance(wanted.ravel(), found.ravel()))
    if reference.read_out is not None and candidate.read_out is not None:
        scale = max(float(np.abs(vector).max()) for vector in reference.read_out)
        for text, (wanted, found) in enumerate(zip(reference.read_out, candidate.read_out, strict=True)):
            gap = float(_gaps(wanted, found).max()) / scale
            if gap > relative:
                relative, worst = gap, (text, -1)
            cosine = max(cosine, _cosine_distance(wanted.ravel(), found.ravel()))
    return StateDifference(relative=relative, worst=worst, cosine=cosine)


def check_states(stage: str, figure: str, what: str, difference: StateDifference) -> Check:
    """A certificate line for one figure ("relative" or "cosine") of a stage, with the table's tolerance."""
    text, token = difference.worst
    place = f"text {text}, " + ("what is read out" if token < 0 else f"token {token}")
    detail = f"relative {difference.relative:.3g} at {place}; 1 - cosine {difference.cosine:.3g}"
    return Check(
        name=f"{stage}: {what}, {figure}",
        measured=getattr(difference, figure),
        tolerance=STATE_TOLERANCES[stage, figure],
        detail=detail,
    )


def _gaps(wanted: NDArray[np.float32], found: NDArray[np.float32]) -> NDArray[np.float64]:
    gap: NDArray[np.float64] = np.abs(wanted.astype(np.float64) - found)
    return np.where(np.isfinite(gap), gap, np.inf)


def _cosine_distance(wanted: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    a, b = wanted.astype(np.float64), found.astype(np.float64)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    if not np.isfinite(norms):
        return float("inf")
    return max(1.0 - float(a @ b) / norms, 0.0) if norms else float(not np.array_equal(a, b))
