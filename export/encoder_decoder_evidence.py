"""What an encoder-decoder is compared on, and the evidence of each stage: a text after each of several sources.

In: the eager module and the graphs. Out: checks, reference rows, what the graphs that ship give in the certificate's
runs. Neighbours are compared as in `certify.py`, so that a failure names its stage.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from graphport.export.bundle import write_graph
from graphport.export.certify import text_ids, text_origin
from graphport.export.decoder_evidence import cache_limits
from graphport.export.float_loss import MeasuredLoss, WideRows
from graphport.export.graph_pass import CompilePlan
from graphport.export.parity import check, compare
from graphport.export.pipeline import compile_graph
from graphport.export.scratch import scratch_folder
from graphport.export.source_examples import example_texts, source_tensor
from graphport.export.source_graph import compile_source, trace_source, write_source
from graphport.export.source_runner import CachedPair, SourceRunner
from graphport.export.targets import CPU
from graphport.model_def.certificate import Check, Limit
from graphport.model_def.certified_inputs import Inputs, SourceInputs
from graphport.model_def.compact_rows import CompactRows, compact_rows, measure_rows
from graphport.model_def.conditioning import Conditioning, LossFigure
from graphport.model_def.config import TransformerConfig
from graphport.model_def.parity_text import PARITY_TEXT
from graphport.model_def.played_runs import Evidence, References, play_runs
from graphport.model_def.seeded_sources import Source, certified_sources
from graphport.model_def.signature import LOGITS
from graphport.model_def.source_runs import planned_source_runs, uncovered_of_sources
from graphport.model_def.transformer import Transformer

# Tokens of each source, and of the decoder's text; those beyond a limit are cut to it.
SOURCE_LENGTHS = (150, 1, 17, 5)
NUM_RECORDINGS = 3  # each as long as the model reads, and its encoder takes the longest of all
NUM_IDS = 96
CHUNKS = (3, 1, 1)  # then the rest in one piece
_EXTRA_PADDING = 7


class EncoderDecoderEvidence:
    """Evidence on the sources and ids of `inputs`, by default of the text that ships, or of seeded recordings."""

    layers: Mapping[str, Any] = {}  # errors by layer are measured for decoders

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
        assert config.encoder is not None
        if inputs is None:
            inputs = _chosen_inputs(config, tokenizer_json, max_length=max_length, seed=seed)
        assert isinstance(inputs, SourceInputs)
        self.inputs = inputs
        self.sources = certified_sources(config, inputs)
        self.uncovered = uncovered_of_sources(config, max_length, self.sources, len(inputs.ids))
        room = config.encoder.max_positions - max(map(len, self.sources))
        self._extra = _EXTRA_PADDING if config.encoder.audio is not None else max(0, min(_EXTRA_PADDING, room))
        self._model = model
        self._seed = seed
        self._loss = MeasuredLoss(model, lambda: self.reference, self._in_float64)

    def conditioning(self, *, measure: bool = False) -> Conditioning | None:
        """What float32 itself loses, where a check missed its absolute limit, or with `measure` where one would."""
        return self._loss.conditioning(measure=measure)

    @functools.cached_property
    def source(self) -> ir.Model:
        """The exported graph of the encoder."""
        return trace_source(self._model)

    @functools.cached_property
    def reference(self) -> NDArray[np.float32]:
        """What the eager module gives after each source alone [texts * S, V]."""
        return np.concatenate([source_logits(self._model, source, self.inputs.ids) for source in self.sources])

    @functools.cached_property
    def original(self) -> Mapping[str, CompactRows]:
        """What the eager module gives, in compact form."""
        return {LOGITS: compact_rows(measure_rows(self.reference, seed=self._seed), range(len(self.reference)))}

    def limits(self, plan: CompilePlan) -> tuple[Limit, ...]:
        """What a bundle of the plan's precision is held to."""
        return cache_limits(plan)

    def certify_stages(
        self, exported: ir.Model, plan: CompilePlan, *, folder: Path, observe: Callable[[str], None]
    ) -> tuple[Check, ...]:
        """Check the exported graphs and their fp32 compilation; both are written to a scratch folder."""
        observe("running eager PyTorch")
        what = f"{len(self.sources)} padded sources, {len(self.inputs.ids)} tokens each"
        with scratch_folder(exported, beside=folder.parent) as scratch:
            observe("parity of the exported graphs")
            write_graph(exported, scratch)
            write_source(self.source, scratch)
            found = self._run(SourceRunner(scratch, plan.config))
            checks = (check("exported", "max_abs", what, compare(self.reference, found), loss=self._loss),)
        with scratch_folder(exported, beside=folder.parent) as scratch:
            observe("parity of the fused graphs")
            fp32 = dataclasses.replace(plan, target=CPU, precision=CPU.precision("fp32"), accuracy_level=None)
            twin = exported.clone()
            compile_graph(twin, fp32)
            write_graph(twin, scratch)
            write_source(compile_source(self.source, fp32)[0], scratch)
            runner = SourceRunner(scratch, plan.config)
            whole, parts = self._run(runner), self._run(runner, chunks=self._pieces())
            return (
                *checks,
                check("compiled", "max_abs", what, compare(self.reference, whole), loss=self._loss),
                check(
                    "compiled",
                    "max_abs",
                    f"{what}, chunks and steps",
                    compare(self.reference, parts),
                    loss=self._loss,
                ),
            )

    def certify_cache(
        self,
        exported: ir.Model,  # noqa: ARG002 - of every kind's evidence, as the next three
        plan: CompilePlan,  # noqa: ARG002
        *,
        folder: Path,  # noqa: ARG002
        observe: Callable[[str], None],  # noqa: ARG002
    ) -> tuple[Check, ...]:
        """No check: there is no KV cache that rounds."""
        return ()

    def play(
        self, plan: CompilePlan, *, folder: Path, limits: Sequence[Limit], observe: Callable[[str], None]
    ) -> tuple[tuple[Check, ...], Evidence]:
        """Play the certificate's runs on the graphs in `folder`; also checks of whole rows, which are not shipped."""
        observe("parity of the bundle")
        whole = (self._certify_shipped(plan, folder=folder), self._certify_alone(plan, folder=folder))
        ids = self.inputs.ids
        found = play_runs(
            CachedPair(folder, plan.config, capacity=len(ids)),
            planned_source_runs(plan.config, self.sources, ids),
            References(original=self.original, limits=limits, keep_rows=True, loss=lambda _: self._loss()),
            observe=lambda run: observe(f"parity of the bundle: {run}"),
        )
        return whole, found

    def _certify_shipped(self, plan: CompilePlan, *, folder: Path) -> Check:
        """Check the graphs in `folder` against eager."""
        found = self._run(SourceRunner(folder, plan.config, optimize=True), chunks=self._pieces())
        what = f"{len(self.sources)} padded sources, {len(self.inputs.ids)} tokens each, as shipped"
        return check(*_stage(plan), what, compare(self.reference, found), loss=self._loss_of(plan))

    def _certify_alone(self, plan: CompilePlan, *, folder: Path) -> Check:
        """Check that neither padding and neighbours of a source nor steps change what the graphs in `folder` give."""
        runner = SourceRunner(folder, plan.config, optimize=True)
        alone = np.concatenate([runner.logits([source], self.inputs.ids)[0] for source in self.sources])
        padded = self._run(runner, chunks=self._pieces(), pad_id=plan.config.vocab_size - 1, extra=self._extra)
        what = "padded sources and single steps against each source alone in one piece"
        return check(*_stage(plan), what, compare(alone, padded), loss=self._loss_of(plan))

    def _loss_of(self, plan: CompilePlan) -> MeasuredLoss | None:
        """What float32 loses, where the bundle computes in it."""
        return self._loss if plan.precision.weight_bits is None else None

    def _in_float64(self) -> list[WideRows]:
        return [_logits_after(self._model, source, self.inputs.ids).numpy() for source in self.sources]

    def _pieces(self) -> tuple[int, ...]:
        return CHUNKS if sum(CHUNKS) < len(self.inputs.ids) else ()

    def _run(
        self, runner: SourceRunner, *, chunks: Sequence[int] = (), pad_id: int = 0, extra: int = 0
    ) -> NDArray[np.float32]:
        return np.concatenate(runner.logits(self.sources, self.inputs.ids, chunks=chunks, pad_id=pad_id, extra=extra))


def _chosen_inputs(
    config: TransformerConfig, tokenizer_json: str | None, *, max_length: int, seed: int
) -> SourceInputs:
    assert config.encoder is not None
    ids = tuple(text_ids(PARITY_TEXT, config, tokenizer_json, length=min(NUM_IDS, max_length), seed=seed + 1))
    origin = text_origin(ids, config, tokenizer_json, seed=seed + 1)
    if config.encoder.audio is not None:
        origin = f"seeded recordings ({seed}); {origin}"
        return SourceInputs(origin=origin, seed=seed, sources=(), num_recordings=NUM_RECORDINGS, ids=ids)
    texts = example_texts(config.encoder, tokenizer_json, lengths=SOURCE_LENGTHS, seed=seed)
    return SourceInputs(origin=origin, seed=seed, sources=texts, num_recordings=0, ids=ids)


def source_logits(model: Transformer, source: Source, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits [S, V] of the eager module over `ids` at once, after one source."""
    with torch.inference_mode():
        logits: NDArray[np.float32] = _logits_after(model, source, ids).numpy()
    return logits


def _logits_after(model: Transformer, source: Source, ids: Sequence[int]) -> torch.Tensor:
    given = source_tensor(source)
    if given.is_floating_point():  # features of a recording
        given = given.to(next(model.parameters()).dtype)
    read = model.encode(given)
    logits: torch.Tensor = model(torch.tensor([list(ids)]), source=read)[0]
    return logits


def _stage(plan: CompilePlan) -> tuple[str, LossFigure]:
    """Stage and figure whose tolerance bounds what ships."""
    return ("compiled", "max_abs") if plan.precision.weight_bits is None else (plan.precision.name, "kl")
