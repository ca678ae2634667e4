"""What an encoder is compared on, and the evidence of each stage: each input alone in eager PyTorch, batches in graphs.

In: the eager module, graphs, a `Feed` of texts or images. Out: checks, reference rows, what the graph that ships gives
in the certificate's runs. Neighbours are compared, so that a failure names its stage.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir

from graphport.export.bundle import write_graph
from graphport.export.encoder_parity import STATE_TOLERANCES, check_states, compare_states
from graphport.export.encoder_runner import States
from graphport.export.graph_pass import CompilePlan
from graphport.export.pipeline import compile_graph
from graphport.export.round_matrices import LOW_BITS
from graphport.export.scratch import scratch_folder
from graphport.export.targets import CPU
from graphport.model_def.certificate import Check, Limit
from graphport.model_def.certified_inputs import Inputs
from graphport.model_def.compact_rows import CompactRows
from graphport.model_def.conditioning import Conditioning
from graphport.model_def.config import TransformerConfig
from graphport.model_def.encoder_runs import outputs_of, reference_rows
from graphport.model_def.played_runs import Evidence, References
from graphport.model_def.signature import GRAPH_FILE
from graphport.model_def.transformer import Transformer


class Feed(Protocol):
    """Inputs of one kind of encoder, and how the eager module and a graph are run on them."""

    words: str
    alone: str
    uncovered: tuple[str, ...]

    @property
    def inputs(self) -> Inputs: ...  # noqa: D102 - what the certificate's runs feed

    def eager(self, model: Transformer) -> States:
        """What the module gives for each input alone."""
        ...

    def batches(self, graph: Path, *, optimize: bool, pad_id: int = 0) -> States:
        """What the graph gives for the inputs together; what pads them, where anything does, is `pad_id`."""
        ...

    def each_alone(self, graph: Path, *, optimize: bool) -> States:
        """What the graph gives for each input alone."""
        ...

    def play(self, graph: Path, references: References, *, observe: Callable[[str], None]) -> Evidence:
        """The certificate's runs, on the graph as it ships."""
        ...


class EncoderEvidence:
    """Evidence of an encoder on what `feed` holds."""

    layers: Mapping[str, Any] = {}  # errors by layer are measured for decoders
    source: ir.Model | None = None

    def __init__(self, config: TransformerConfig, feed: Feed, *, model: Transformer, seed: int) -> None:
        self.inputs = feed.inputs
        self.uncovered = feed.uncovered
        self._config = config
        self._feed = feed
        self._model = model
        self._seed = seed

    @functools.cached_property
    def _states(self) -> States:
        return self._feed.eager(self._model)

    @functools.cached_property
    def original(self) -> Mapping[str, CompactRows]:
        """What the eager module gives, in compact form."""
        values = zip(outputs_of(self._config), [part for part in self._states if part is not None], strict=True)
        return {output: reference_rows(rows, seed=self._seed) for output, rows in values}

    def conditioning(self, *, measure: bool = False) -> Conditioning | None:  # noqa: ARG002 - of every kind's evidence
        """None: limits of encoders are relative to the largest state."""
        return None

    def limits(self, plan: CompilePlan) -> tuple[Limit, ...]:
        """What a bundle of the plan's precision is held to: every row in float32, else what is read out of the rows."""
        same = Limit(
            against="shipped",
            figure="relative",
            tolerance=STATE_TOLERANCES["repeated", "relative"],
            where="same kernels",
        )
        if _is_float32(plan):
            tolerance = STATE_TOLERANCES["compiled", "relative"]
            return (Limit(against="original", figure="relative", tolerance=tolerance), same)
        output = outputs_of(self._config)[-1]
        return (
            Limit(
                against="original",
                figure="cosine",
                tolerance=STATE_TOLERANCES[plan.precision.name, "cosine"],
                output=output,
            ),
            Limit(against="shipped", figure="cosine", tolerance=STATE_TOLERANCES["repeated", "cosine"], output=output),
            same,
        )

    def certify_stages(
        self, exported: ir.Model, plan: CompilePlan, *, folder: Path, observe: Callable[[str], None]
    ) -> tuple[Check, ...]:
        """Check the exported graph and its fp32 compilation; both are written to a scratch folder."""
        observe("running eager PyTorch")
        reference, feed = self._states, self._feed
        with scratch_folder(exported, beside=folder.parent) as scratch:
            observe("parity of the exported graph")
            write_graph(exported, scratch)
            found = feed.batches(scratch / GRAPH_FILE, optimize=False)
            checks = (check_states("exported", "relative", feed.words, compare_states(reference, found)),)
        with scratch_folder(exported, beside=folder.parent) as scratch:
            observe("parity of the fused graph")
            twin = exported.clone()
            compile_graph(
                twin, dataclasses.replace(plan, target=CPU, precision=CPU.precision("fp32"), accuracy_level=None)
            )
            write_graph(twin, scratch)
            graph = scratch / GRAPH_FILE
            together = compare_states(reference, feed.batches(graph, optimize=False))
            alone = compare_states(reference, feed.each_alone(graph, optimize=False))
            return (
                *checks,
                check_states("compiled", "relative", feed.words, together),
                check_states("compiled", "relative", feed.alone, alone),
            )

    def certify_cache(
        self,
        exported: ir.Model,  # noqa: ARG002 - of every kind's evidence, as the next three
        plan: CompilePlan,  # noqa: ARG002
        *,
        folder: Path,  # noqa: ARG002
        observe: Callable[[str], None],  # noqa: ARG002
    ) -> tuple[Check, ...]:
        """No check: there is no KV cache."""
        return ()

    def play(
        self, plan: CompilePlan, *, folder: Path, limits: Sequence[Limit], observe: Callable[[str], None]
    ) -> tuple[tuple[Check, ...], Evidence]:
        """Play the certificate's runs on the graph in `folder`; also checks of whole rows, which are not shipped."""
        graph, feed = folder / GRAPH_FILE, self._feed
        observe("parity of the bundle")
        together = feed.batches(graph, optimize=True, pad_id=self._config.vocab_size - 1)
        alone = feed.each_alone(graph, optimize=True)
        stage, figure = ("compiled", "relative") if _is_float32(plan) else (plan.precision.name, "cosine")
        # pieces of a text are other shapes to the kernels: what is rounded to 8 bits differs in its last bits
        rounds_apart = self._config.is_recurrent and not _is_float32(plan)
        beside = "cosine" if rounds_apart or plan.precision.weight_bits == LOW_BITS else "relative"
        whole = (
            check_states(stage, figure, f"{feed.words}, as shipped", compare_states(self._states, together)),
            check_states("neighbours", beside, f"{feed.words} against {feed.alone}", compare_states(alone, together)),
        )
        found = feed.play(
            graph,
            References(original=self.original, limits=limits, keep_rows=True),
            observe=lambda run: observe(f"parity of the bundle: {run}"),
        )
        return whole, found


def _is_float32(plan: CompilePlan) -> bool:
    return plan.precision.weight_bits is None and plan.precision.activations == "float32"
