"""What a masked head gives for a place: candidates by probability.

In: logits of masked places. Out: `FilledMask` records. It runs nothing.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FilledMask:
    """One candidate for a masked place; `token` is its text, None in a bundle without a tokenizer."""

    token_id: int
    token: str | None
    probability: float


def best_tokens(logits: NDArray[np.float32], *, top_k: int, tokenizer: Tokenizer | None) -> list[FilledMask]:
    """The `top_k` most probable tokens of one place's logits [V], the lowest id first among equals."""
    chosen = np.argsort(-logits, kind="stable")[:top_k]
    powers = np.exp((logits - logits.max()).astype(np.float64))
    shares = powers / powers.sum()
    return [
        FilledMask(
            token_id=int(token),
            token=None if tokenizer is None else tokenizer.decode([int(token)], skip_special_tokens=False),
            probability=float(shares[token]),
        )
        for token in chosen
    ]
