"""What a decoder is compared on, and the evidence of each stage: one text, eager PyTorch's logits of it.

In: the eager module, graphs. Out: checks, reference rows, what the graph that ships gives in the certificate's runs.
The comparisons themselves are `certify.py`'s and `played_runs.py`'s.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from graphport.export.cached_graph import CachedGraph
from graphport.export.certify import (
    certify_cache,
    certify_stages,
    check_shipped,
    eager_logits,
    loss_of_text,
    parity_ids,
    text_origin,
)
from graphport.export.graph_pass import CompilePlan
from graphport.export.guilty_pass import guilty_level
from graphport.export.layer_errors import LayerErrors
from graphport.export.parity import TOLERANCES
from graphport.export.targets import CPU
from graphport.export.traced_models import TracedGraph
from graphport.export.window_caches import window_layers
from graphport.model_def.certificate import Check, Limit
from graphport.model_def.certified_inputs import Inputs, TextInputs
from graphport.model_def.compact_rows import CompactRows, compact_rows, measure_rows
from graphport.model_def.conditioning import Conditioning
from graphport.model_def.config import TransformerConfig
from graphport.model_def.decoder_runs import planned_runs, uncovered
from graphport.model_def.played_runs import Evidence, References, play_runs
from graphport.model_def.signature import GRAPH_FILE, LOGITS
from graphport.model_def.transformer import Transformer

SHIPPED_NAME = "the graph that ships"

_SAME_KERNELS = Limit(against="shipped", figure="rms", tolerance=TOLERANCES["repeated", "rms"], where="same kernels")
_OTHER_KERNELS = Limit(against="shipped", figure="kl", tolerance=TOLERANCES["repeated", "kl"])


class DecoderEvidence:
    """Evidence on the ids of `inputs`, by default those of the text that ships."""

    source: ir.Model | None = None

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer_json: str | None,
        *,
        max_length: int,
        seed: int,
        model: Transformer,
        inputs: Inputs | None = None,
    ) -> None:
        if inputs is None:
            ids = parity_ids(config, tokenizer_json, max_length=max_length, seed=seed)
            inputs = TextInputs(origin=text_origin(ids, config, tokenizer_json, seed=seed), ids=tuple(ids))
        assert isinstance(inputs, TextInputs)
        self.inputs = inputs
        self.uncovered = uncovered(config, max_length, len(inputs.ids))
        self._config = config
        self._seed = seed
        self._model = model
        self._layers = LayerErrors(model, inputs.ids)
        self._loss = loss_of_text(model, inputs.ids, lambda: self._logits)
        self._whole: list[Check] = []

    @property
    def layers(self) -> Mapping[str, Any]:
        """Errors of each place of the model, of the graphs that were measured."""
        return self._layers.found

    def conditioning(self, *, measure: bool = False) -> Conditioning | None:
        """What float32 itself loses, where a check missed its absolute limit, or with `measure` where one would."""
        return self._loss.conditioning(measure=measure)

    @functools.cached_property
    def _logits(self) -> NDArray[np.float32]:
        return eager_logits(self._model, self.inputs.ids)

    @functools.cached_property
    def original(self) -> Mapping[str, CompactRows]:
        """What the eager module gives, in compact form."""
        measured = measure_rows(self._logits, seed=self._seed)
        return {LOGITS: compact_rows(measured, range(len(self.inputs.ids)))}

    def limits(self, plan: CompilePlan) -> tuple[Limit, ...]:
        """What a bundle of the plan's precision and cache is held to."""
        return cache_limits(plan)

    def certify_stages(
        self, exported: ir.Model, plan: CompilePlan, *, folder: Path, observe: Callable[[str], None]
    ) -> tuple[Check, ...]:
        """See the function of this name."""
        observe("running eager PyTorch")
        ids, trace = self.inputs.ids, self._layers.measure
        return certify_stages(
            exported, plan, ids, self._logits, folder=folder, observe=observe, trace=trace, loss=self._loss
        )

    def certify_cache(
        self, exported: ir.Model, plan: CompilePlan, *, folder: Path, observe: Callable[[str], None]
    ) -> tuple[Check, ...]:
        """Check the KV cache of what ships in `folder` against a float cache."""
        if plan.cache is None:
            return ()
        observe("parity of the KV cache")
        return certify_cache(exported, plan, self.inputs.ids, folder=folder)

    def play(
        self, plan: CompilePlan, *, folder: Path, limits: Sequence[Limit], observe: Callable[[str], None]
    ) -> tuple[tuple[Check, ...], Evidence]:
        """Play the certificate's runs on the graph in `folder`; also the whole rows of the text in one piece."""
        ids = self.inputs.ids
        whole: list[Check] = []

        def compare_whole(positions: Sequence[int], rows: NDArray[np.float32]) -> None:
            """The text in one piece is the prefill's last; it is compared while all of its rows are there."""
            if positions[-1] == len(ids) - 1:
                wanted = self._logits[list(positions)]
                whole.append(check_shipped(plan, len(ids), wanted, rows, loss=self._loss, rows=positions))

        prefill, *others = planned_runs(self._config, ids)
        found = play_runs(
            CachedGraph(folder / GRAPH_FILE, self._config, capacity=len(ids), window_layers=window_layers(plan)),
            [prefill.watched(compare_whole), *others],
            References(original=self.original, limits=limits, keep_rows=True, loss=lambda _: self._loss()),
            observe=lambda run: observe(f"parity of the bundle: {run}"),
        )
        observe("errors by layer")
        whole = [self._blamed(one, plan, folder) for one in whole]
        graph = TracedGraph(SHIPPED_NAME, folder, self._config, capacity=1, provider=CPU.provider)
        self._layers.measure(graph, plan)
        return tuple(whole), found

    def _blamed(self, check: Check, plan: CompilePlan, folder: Path) -> Check:
        """The check; one that failed says at which level of ONNX Runtime's optimiser the graph is beyond tolerance."""
        if check.passed:
            return check
        figure = "max_abs" if plan.precision.weight_bits is None else "kl"
        level = guilty_level(folder, plan, self.inputs.ids, self._logits, figure=figure, tolerance=check.tolerance)
        return dataclasses.replace(check, detail=f"{check.detail}; {level}")


def cache_limits(plan: CompilePlan) -> tuple[Limit, ...]:
    """What logits over the plan's precision and cache are held to."""
    precision, cache = plan.precision, plan.cache
    if cache is None and precision.weight_bits is None and precision.activations == "float32":
        exact = [
            Limit(against="original", figure=figure, tolerance=TOLERANCES["compiled", figure], conditioned=True)
            for figure in ("max_abs", "rms")
        ]
        return (*exact, _SAME_KERNELS)
    weights = 0.0 if precision.name == "fp32" else TOLERANCES[precision.name, "kl"]
    rounding = weights + (0.0 if cache is None else TOLERANCES[f"{cache.name} cache", "kl"])
    return (Limit(against="original", figure="kl", tolerance=rounding), _OTHER_KERNELS, _SAME_KERNELS)
