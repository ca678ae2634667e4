"""Where two forms of a model part: the first step, layer and op whose error is above a tolerance, and how it grew.

In: two `TracedModel`s and the ids of a text. Out: a `Divergence`. It opens nothing (see `model_diff.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.export.traced_models import TracedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteError:
    """The error of one site in one step: `step` 0 is the prompt in one piece, later ones are single tokens.

    `relative`: root mean square of the difference over that of the first model's value; `max_abs`: largest difference.
    """

    step: int
    site: str
    relative: float
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Errors in the order of computation; `first` is the first above `tolerance`, None when there is none."""

    first_model: str
    second_model: str
    tolerance: float
    errors: tuple[SiteError, ...]

    @property
    def first(self) -> SiteError | None:
        """The first error above tolerance."""
        return next((error for error in self.errors if not error.relative <= self.tolerance), None)

    def growth(self, count: int = 8) -> tuple[SiteError, ...]:
        """The errors up to the first above tolerance, or the largest of each site when there is none."""
        if self.first is None:
            largest: dict[str, SiteError] = {}
            for error in self.errors:
                if error.site not in largest or error.relative > largest[error.site].relative:
                    largest[error.site] = error
            return tuple(largest.values())
        at = self.errors.index(self.first)
        return self.errors[max(0, at + 1 - count) : at + 1]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        plain = asdict(self)
        return {**plain, "first": None if self.first is None else asdict(self.first)}


def first_divergence(
    first: TracedModel,
    second: TracedModel,
    ids: Sequence[int],
    *,
    sites: Sequence[str],
    num_steps: int,
    tolerance: float,
    observe: Callable[[str], None] = lambda _: None,
) -> Divergence:
    """Feed both all but the last `num_steps` of `ids` in one piece, these one by one; compare the sites both have."""
    shared = [site for site in sites if site in first.sites & second.sites]
    pieces = [list(ids[: len(ids) - num_steps]), *([token] for token in ids[len(ids) - num_steps :])]
    errors: list[SiteError] = []
    for step, piece in enumerate(pieces):
        observe(f"step {step} of {num_steps}")
        wanted, found = first.step(piece), second.step(piece)
        errors += [site_error(step, site, wanted[site], found[site]) for site in shared]
    return Divergence(first_model=first.name, second_model=second.name, tolerance=tolerance, errors=tuple(errors))


def site_error(step: int, site: str, wanted: NDArray[np.float32], found: NDArray[np.float32]) -> SiteError:
    """How far `found` is from `wanted`, both [S, width]. Raises ValueError when the shapes differ."""
    if wanted.shape != found.shape:
        raise ValueError(f"{site} is {wanted.shape} in one model, {found.shape} in the other: they cannot be compared")
    gap = np.abs(wanted.astype(np.float64) - found)
    size = float(np.sqrt((wanted.astype(np.float64) ** 2).mean()))
    relative = float(np.sqrt((gap**2).mean())) / max(size, 1e-30)
    is_finite = bool(np.isfinite(gap).all())
    return SiteError(
        step=step,
        site=site,
        relative=relative if is_finite else float("inf"),
        max_abs=float(gap.max()) if is_finite else float("inf"),
    )
