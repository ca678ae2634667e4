"""The error of each place of a model against eager PyTorch, prompt and single steps apart: what a certificate draws.

In: an eager module, the ids of a text, open graphs. Out: JSON data, a record a graph. Nothing is judged by it: the
logits are (see `certify.py`), and `graphport diff` names the first place above a tolerance.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from graphport.export.first_divergence import site_error
from graphport.export.graph_pass import CompilePlan
from graphport.export.graph_sites import ordered_sites, value_site
from graphport.export.traced_models import TracedEager, TracedGraph, Values
from graphport.model_def.transformer import Transformer

NUM_IDS, NUM_STEPS = 32, 4


class LayerErrors:
    """Measures graphs against `model` on the first of `ids`; `found` holds what came of it by the graph's name."""

    def __init__(self, model: Transformer, ids: Sequence[int]) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._model = model
        ids = ids[:NUM_IDS]
        first = max(1, len(ids) - NUM_STEPS)
        self._pieces = [list(ids[:first]), *([token] for token in ids[first:])]
        self._capacity = len(ids)

    @functools.cached_property
    def _eager(self) -> list[Values]:
        """Values of each piece, of one pass: a token of a decoder does not see those after it."""
        ids = [token for piece in self._pieces for token in piece]
        whole = TracedEager("eager", self._model, capacity=self._capacity).step(ids)
        ends = list(itertools.accumulate(len(piece) for piece in self._pieces))
        cuts = [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]
        return [{site: rows[cut] for site, rows in whole.items()} for cut in cuts]

    def measure(self, graph: TracedGraph, plan: CompilePlan) -> None:
        """Add the errors of `graph`, a decoder compiled by `plan`; what it was fed before is forgotten.

        `relative`: by step, root mean square of the difference over that of eager's value, a number a site.
        """
        layers = range(plan.config.num_layers)
        smoothed = {value_site(layer) for layer in layers} if plan.activation_ranges else set()
        shown = (graph.sites & self._eager[0].keys()) - smoothed
        sites = [site for site in ordered_sites(plan.config.num_layers) if site in shown]
        graph.restart(self._capacity)
        relative = []
        for step, piece in enumerate(self._pieces):
            wanted, found = self._eager[step], graph.step(piece)
            errors = [site_error(step, site, wanted[site], found[site]).relative for site in sites]
            relative.append([float(f"{error:.3g}") for error in errors])
        self.found[graph.name] = {"prompt": len(self._pieces[0]), "sites": sites, "relative": relative}
