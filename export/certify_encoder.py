"""The parity evidence of an encoder: eager on each text alone against the graphs on padded batches.

In: the eager module and the graphs. Out: checks. Neighbours are compared as in `certify.py`, so a failure names its
stage; what differs is what is run: ragged batches here, chunks and steps over a cache there.
"""

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import torch

from graphport.export.bundle import write_graph
from graphport.export.certify import text_ids
from graphport.export.encoder_parity import check_states, compare_states
from graphport.export.encoder_runner import EncoderRunner, Row, States
from graphport.export.graph_pass import CompilePlan
from graphport.export.pipeline import compile_graph
from graphport.export.targets import CPU
from graphport.model_def.certificate import Check
from graphport.model_def.config import TransformerConfig
from graphport.model_def.ops import pool
from graphport.model_def.parity_text import PARITY_TEXT
from graphport.model_def.signature import GRAPH_FILE
from graphport.model_def.transformer import Transformer

# Tokens of each text; those beyond the limit are cut to it.
LENGTHS = (96, 1, 31, 7, 128, 2, 64, 16)


class EncoderEvidence:
    """Texts to compare on, and the checks of each stage; without a model those that need no reference."""

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer_json: str | None,
        *,
        max_length: int,
        seed: int,
        model: Transformer | None = None,
    ) -> None:
        self._rows = parity_rows(config, tokenizer_json, max_length=max_length, seed=seed)
        self._model = model

    @functools.cached_property
    def reference(self) -> States:
        """What the eager module gives for each text alone."""
        assert self._model is not None
        return eager_states(self._model, self._rows)

    def certify_stages(
        self, exported: ir.Model, plan: CompilePlan, *, folder: Path, observe: Callable[[str], None]
    ) -> tuple[Check, ...]:
        """Check the exported graph and its fp32 compilation; writes and removes both under `folder`'s parent."""
        observe("running eager PyTorch")
        reference, what = self.reference, f"{len(self._rows)} texts in one padded batch"
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".parity.") as name:
            observe("parity of the exported graph")
            write_graph(exported, Path(name))
            found = EncoderRunner(Path(name) / GRAPH_FILE).states(self._rows)
            checks = (check_states("exported", "relative", what, compare_states(reference, found)),)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".parity.") as name:
            observe("parity of the fused graph")
            twin = exported.clone()
            compile_graph(
                twin, dataclasses.replace(plan, target=CPU, precision=CPU.precision("fp32"), accuracy_level=None)
            )
            write_graph(twin, Path(name))
            runner = EncoderRunner(Path(name) / GRAPH_FILE)
            alone = _joined([runner.states([row]) for row in self._rows])
            return (
                *checks,
                check_states("compiled", "relative", what, compare_states(reference, runner.states(self._rows))),
                check_states("compiled", "relative", "each text alone", compare_states(reference, alone)),
            )

    def certify_bundle(
        self,
        exported: ir.Model,  # noqa: ARG002 - of every kind's evidence
        plan: CompilePlan,
        *,
        folder: Path,
        observe: Callable[[str], None],
    ) -> tuple[Check, ...]:
        """Check what ships in `folder` where the CPU runs it."""
        if plan.target is not CPU:
            return ()
        observe("parity of the bundle")
        return (*self.certify_shipped(plan, folder=folder), *self.certify_alone(plan, folder=folder))

    def certify_shipped(self, plan: CompilePlan, *, folder: Path) -> tuple[Check, ...]:
        """Check the graph in `folder` against eager."""
        found = EncoderRunner(folder / GRAPH_FILE, optimize=True).states(self._rows)
        what = f"{len(self._rows)} texts in one padded batch, as shipped"
        return (check_states(*_stage(plan), what, compare_states(self.reference, found)),)

    def certify_alone(self, plan: CompilePlan, *, folder: Path) -> tuple[Check, ...]:
        """Check that a text's states in the graph in `folder` depend neither on its neighbours nor on its padding."""
        runner = EncoderRunner(folder / GRAPH_FILE, optimize=True)
        alone = _joined([runner.states([row]) for row in self._rows])
        batch = runner.states(self._rows, pad_id=plan.config.vocab_size - 1)
        return (
            check_states(
                "neighbours", "relative", "a padded batch against each text alone", compare_states(alone, batch)
            ),
        )


def parity_rows(config: TransformerConfig, tokenizer_json: str | None, *, max_length: int, seed: int) -> list[Row]:
    """Texts of different lengths, English where there is a tokenizer; the second half of each is of another type."""
    lengths = [min(length, max_length) for length in LENGTHS]
    ids = text_ids(PARITY_TEXT, config, tokenizer_json, length=sum(lengths), seed=seed)
    starts = itertools.accumulate(lengths, initial=0)
    other = max(config.token_types - 1, 0)
    return [
        Row(ids[start : start + length], [0] * (length // 2) + [other] * (length - length // 2))
        for start, length in zip(starts, lengths, strict=False)
    ]


def eager_states(model: Transformer, rows: list[Row]) -> States:
    """States of the eager module, one text at a time: nothing is padded."""
    hidden, read_out = [], []
    pooling = model.config.pooling
    with torch.inference_mode():
        for row in rows:
            types = torch.tensor([list(row.types)]) if model.config.token_types > 1 else None
            states = model(torch.tensor([list(row.ids)]), token_types=types)
            hidden.append(states[0].numpy())
            if pooling is not None:
                read_out.append(pool(states, torch.tensor([len(row.ids)], dtype=torch.int32), pooling.kind)[0].numpy())
            if model.classifier is not None:
                read_out.append(model.classifier(states)[0].numpy())
    return States(hidden, read_out or None)


def _joined(parts: list[States]) -> States:
    """One `States` of several texts' own."""
    read_out = [vector for part in parts for vector in part.read_out or ()]
    return States([states for part in parts for states in part.hidden], read_out or None)


def _stage(plan: CompilePlan) -> tuple[str, str]:
    """Stage and figure whose tolerance bounds what ships."""
    return ("compiled", "relative") if plan.precision.weight_bits is None else (plan.precision.name, "cosine")
