"""Beam search in groups that differ: each group pays for the ids that the groups before it have just chosen.

In: the log probabilities of the next id of each beam. Out: what `BeamSearch` gives. Diverse beam search, Vijayakumar et
al. 2016, with Hamming diversity: a group goes on with the best of score + log P - penalty * (how often groups before it
chose the id at this step, end ids aside), and its scores hold what it paid, as in `transformers`. Within a group the
rules are those of `beam_search.py`. K: beams; V: vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.beam_search import BeamSearch, Hypothesis


class DiverseBeamSearch:
    """Searches of equally many beams, one after the other in every step; beams are theirs in order."""

    def __init__(self, groups: Sequence[BeamSearch], *, penalty: float) -> None:
        self._groups = tuple(groups)
        self._penalty = np.float32(penalty)

    @property
    def beams(self) -> list[tuple[int, ...]]:
        """The beams of all groups; those of a group that is over stay as they are."""
        return [beam for group in self._groups for beam in group.beams]

    @property
    def is_over(self) -> bool:
        """Whether nothing better can come in any group."""
        return all(group.is_over for group in self._groups)

    def advance(self, log_probs: NDArray[np.float32]) -> list[int]:
        """Take one step with `log_probs` [K, V] of the beams in order; the parent of each next beam, by number."""
        chosen = np.zeros(log_probs.shape[1], np.float32)
        parents: list[int] = []
        for group in self._groups:
            begin = len(parents)
            own = range(begin, begin + group.num_beams)
            if group.is_over:
                parents += own
                continue
            found = group.advance(log_probs[begin : own.stop] - self._penalty * chosen)
            parents += [begin + parent for parent in found]
            np.add.at(chosen, group.chosen, 1.0)
        return parents

    def best(self, count: int) -> list[Hypothesis]:
        """The `count` best texts that are done in any group, the best first; of equals that of the earlier group."""
        done = [text for group in self._groups for text in group.best(group.num_beams)]
        return sorted(done, key=lambda text: -text.score)[:count]
