"""What float32 itself loses in a model, row by row, and limits that allow for it where a model is ill-conditioned.

In: errors of rows, and how far eager PyTorch in float32 is from eager PyTorch in float64 there. Out: the row that is
closest to its limit. It runs no model (see `export/float_loss.py`). Legend: N rows.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# How many times float32's own loss on a row a right graph may be from eager float32: both are about that far from the
# truth. Right graphs showed at most 5.2 times (rms 6.0; median 0.7 to 1.4) over 9 tiny models of 2 to 40 layers and
# SmolLM2 with larger weights, one doubled weight of 40 layers 34 times, other faults 1,000 and more.
LOSS_FACTOR = 10.0
# Of a row's largest number, and of the divergence: no limit is above. Where float32 loses more, nothing computed in it
# is evidence.
MOST_RELATIVE = 0.01
MOST_KL = 1e-3

LossFigure = Literal["max_abs", "rms", "kl"]
CONDITIONED_FIGURES: tuple[LossFigure, ...] = ("max_abs", "rms", "kl")

_NAMES = (*CONDITIONED_FIGURES, "largest")  # of the fields of a FloatLoss


class Nearest(NamedTuple):
    """The row whose error is largest beside its limit, of those beyond the tolerance.

    Its error, its limit, and what float32 loses on it; `is_capped`: more than a limit may allow.
    """

    error: float
    limit: float
    loss: float
    is_capped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatLoss:
    """Eager float32 against eager float64, float32 [N] each, of rows of logits numbered 0 .. N-1.

    `max_abs`: largest difference. `rms`: root mean square of the row's. `kl`: divergence in nats. `largest`: the row's
    largest absolute number.
    """

    max_abs: NDArray[np.float32]
    rms: NDArray[np.float32]
    kl: NDArray[np.float32]
    largest: NDArray[np.float32]

    def nearest(
        self, figure: LossFigure, errors: NDArray[np.float64], rows: NDArray[np.integer[Any]], tolerance: float
    ) -> Nearest:
        """Hold `errors` [R] of these `rows` [R] to `tolerance` or LOSS_FACTOR times float32's loss, where that is more.

        "kl" grows with the square of the error, and is held as the mean over the rows.
        """
        losses = getattr(self, figure)[rows].astype(np.float64)
        if figure == "kl":
            loss = float(losses.mean())
            limit = max(tolerance, min(LOSS_FACTOR**2 * loss, MOST_KL))
            return Nearest(float(errors.mean()), limit, loss, is_capped=LOSS_FACTOR**2 * loss > MOST_KL)
        most = MOST_RELATIVE * self.largest[rows].astype(np.float64)
        limits = np.maximum(tolerance, np.minimum(LOSS_FACTOR * losses, most))
        worst = int(np.where(errors > tolerance, errors / limits, 0.0).argmax())  # no other needs a limit of its own
        is_capped = bool(LOSS_FACTOR * losses[worst] > most[worst])
        return Nearest(float(errors[worst]), float(limits[worst]), float(losses[worst]), is_capped=is_capped)

    def raises(self, tolerance: float) -> bool:
        """Whether a row's limit for "max_abs" is above `tolerance`."""
        return bool((LOSS_FACTOR * self.max_abs > tolerance).any())

    def to_dict(self) -> dict[str, str]:
        """Plain JSON data; arrays as base64 of little-endian bytes."""
        return {name: base64.b64encode(getattr(self, name).astype("<f4").tobytes()).decode("ascii") for name in _NAMES}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "FloatLoss":
        """What `to_dict` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        arrays = {name: np.frombuffer(base64.b64decode(data[name], validate=True), "<f4") for name in _NAMES}
        if len({len(values) for values in arrays.values()}) != 1:
            raise ValueError("the figures of float32's loss are of different numbers of rows")
        return cls(**{name: values.astype(np.float32) for name, values in arrays.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """What float32 loses by output; there is none of a model that keeps its absolute limits."""

    losses: Mapping[str, FloatLoss]

    @property
    def words(self) -> str:
        """What was measured, and what follows from it."""
        losses = "; ".join(
            f"up to {loss.max_abs.max():.3g} of {output} as large as {loss.largest.max():.3g}"
            for output, loss in self.losses.items()
        )
        return (
            f"ill-conditioned: eager PyTorch in float32 is itself off from float64 by {losses}. Rows beyond the "
            f"absolute limit are held to {LOSS_FACTOR:g} times what float32 loses on them"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"words": self.words, "losses": {output: loss.to_dict() for output, loss in self.losses.items()}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Conditioning":
        """What `to_dict` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        return cls(losses={str(output): FloatLoss.from_dict(loss) for output, loss in data["losses"].items()})


def explained(nearest: Nearest, tolerance: float) -> str:
    """Why a limit is another than the absolute one, or why it is not, in words."""
    if nearest.limit <= tolerance:
        return f"; float32 itself loses {nearest.loss:.3g} there, which does not explain it"
    if nearest.is_capped:
        return (
            f"; float32 itself loses {nearest.loss:.3g} there, so much that nothing computed in it is evidence of this "
            f"model (at most {nearest.limit:.3g} may be allowed for it)"
        )
    return f"; float32 itself loses {nearest.loss:.3g} there, so the limit is {nearest.limit:.3g} and not {tolerance:g}"
