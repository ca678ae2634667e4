"""The parity evidence of an encoder-decoder: eager on each source alone against the two graphs, padded and in steps.

In: the eager module and the graphs. Out: checks. Neighbours are compared as in `certify.py`, so a failure names its
stage.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from graphport.export.bundle import write_graph, write_json
from graphport.export.certify import text_ids
from graphport.export.graph_pass import CompilePlan
from graphport.export.parity import check, compare
from graphport.export.pipeline import compile_graph
from graphport.export.source_examples import Source, example_sources, source_tensor
from graphport.export.source_graph import compile_source, trace_source, write_source
from graphport.export.source_runner import SourceRunner
from graphport.export.targets import CPU
from graphport.model_def.certificate import Check
from graphport.model_def.certified_inputs import Inputs
from graphport.model_def.config import TransformerConfig
from graphport.model_def.file_hashes import record_file
from graphport.model_def.parity_text import PARITY_TEXT
from graphport.model_def.signature import CERTIFICATE_FILE, MANIFEST_FILE, Manifest
from graphport.model_def.transformer import Transformer

# Tokens of each source, and of the decoder's text; those beyond a limit are cut to it.
SOURCE_LENGTHS = (48, 1, 17, 5)
NUM_IDS = 24
CHUNKS = (3, 1, 1)  # then the rest in one piece
_EXTRA_PADDING = 7


class EncoderDecoderEvidence:
    """Sources and a text to compare on, and the checks of each stage; without a model those that need no reference."""

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer_json: str | None,
        *,
        max_length: int,
        seed: int,
        model: Transformer | None = None,
        inputs: Inputs | None = None,  # noqa: ARG002 - of every kind's evidence; these are made here
    ) -> None:
        assert config.encoder is not None
        self.sources = example_sources(config.encoder, tokenizer_json, lengths=SOURCE_LENGTHS, seed=seed)
        self.ids = text_ids(PARITY_TEXT, config, tokenizer_json, length=min(NUM_IDS, max_length), seed=seed + 1)
        room = config.encoder.max_positions - max(SOURCE_LENGTHS)
        self._extra = _EXTRA_PADDING if config.encoder.audio is not None else max(0, min(_EXTRA_PADDING, room))
        self._model = model

    @functools.cached_property
    def source(self) -> ir.Model:
        """The exported graph of the encoder."""
        assert self._model is not None
        return trace_source(self._model)

    @functools.cached_property
    def reference(self) -> NDArray[np.float32]:
        """What the eager module gives after each source alone [texts * S, V]."""
        assert self._model is not None
        return np.concatenate([source_logits(self._model, source, self.ids) for source in self.sources])

    def certify_stages(
        self, exported: ir.Model, plan: CompilePlan, *, folder: Path, observe: Callable[[str], None]
    ) -> tuple[Check, ...]:
        """Check the exported graphs and their fp32 compilation; writes and removes both under `folder`'s parent."""
        observe("running eager PyTorch")
        what = f"{len(self.sources)} padded sources, {len(self.ids)} tokens each"
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".parity.") as name:
            observe("parity of the exported graphs")
            write_graph(exported, Path(name))
            write_source(self.source, Path(name))
            found = self._run(SourceRunner(Path(name), plan.config))
            checks = (check("exported", "max_abs", what, compare(self.reference, found)),)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".parity.") as name:
            observe("parity of the fused graphs")
            fp32 = dataclasses.replace(plan, target=CPU, precision=CPU.precision("fp32"), accuracy_level=None)
            twin = exported.clone()
            compile_graph(twin, fp32)
            write_graph(twin, Path(name))
            write_source(compile_source(self.source, fp32)[0], Path(name))
            runner = SourceRunner(Path(name), plan.config)
            whole, parts = self._run(runner), self._run(runner, chunks=self._pieces())
            return (
                *checks,
                check("compiled", "max_abs", what, compare(self.reference, whole)),
                check("compiled", "max_abs", f"{what}, chunks and steps", compare(self.reference, parts)),
            )

    def certify_cache(
        self,
        exported: ir.Model,  # noqa: ARG002 - of every kind's evidence
        plan: CompilePlan,
        *,
        folder: Path,
        observe: Callable[[str], None],
    ) -> tuple[Check, ...]:
        """Check all of what ships in `folder`, its cache with it, where the CPU runs it."""
        if plan.target is not CPU:
            return ()
        observe("parity of the bundle")
        return (*self.certify_shipped(plan, folder=folder), *self.certify_alone(plan, folder=folder))

    def certify_shipped(self, plan: CompilePlan, *, folder: Path) -> tuple[Check, ...]:
        """Check the graphs in `folder` against eager."""
        found = self._run(SourceRunner(folder, plan.config, optimize=True), chunks=self._pieces())
        what = f"{len(self.sources)} padded sources, {len(self.ids)} tokens each, as shipped"
        return (check(*_stage(plan), what, compare(self.reference, found)),)

    def certify_alone(self, plan: CompilePlan, *, folder: Path) -> tuple[Check, ...]:
        """Check that neither padding and neighbours of a source nor steps change what the graphs in `folder` give."""
        runner = SourceRunner(folder, plan.config, optimize=True)
        alone = np.concatenate([runner.logits([source], self.ids)[0] for source in self.sources])
        padded = self._run(runner, chunks=self._pieces(), pad_id=plan.config.vocab_size - 1, extra=self._extra)
        what = "padded sources and single steps against each source alone in one piece"
        return (check(*_stage(plan), what, compare(alone, padded)),)

    def _pieces(self) -> tuple[int, ...]:
        return CHUNKS if sum(CHUNKS) < len(self.ids) else ()

    def _run(
        self, runner: SourceRunner, *, chunks: Sequence[int] = (), pad_id: int = 0, extra: int = 0
    ) -> NDArray[np.float32]:
        return np.concatenate(runner.logits(self.sources, self.ids, chunks=chunks, pad_id=pad_id, extra=extra))


def add_checks(folder: Path, manifest: Manifest, candidate: Mapping[str, Any], checks: tuple[Check, ...]) -> Manifest:
    """Write the checks as the bundle's certificate and list it in the manifest there, which is returned.

    It holds no rows: `verify` runs the evidence again from the graphs, and from the source where it is given.
    """
    path = folder / CERTIFICATE_FILE
    plain = [{**dataclasses.asdict(one), "passed": one.passed} for one in checks]
    write_json(path, {"format": "checks alone", "candidate": dict(candidate), "checks": plain})
    files = dict(sorted({**manifest.files, path.name: record_file(path)}.items()))
    listed = dataclasses.replace(manifest, files=files)
    (folder / MANIFEST_FILE).write_text(listed.to_json(), encoding="utf-8")
    return listed


def source_logits(model: Transformer, source: Source, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits [S, V] of the eager module over `ids` at once, after one source."""
    with torch.inference_mode():
        read = model.encode(source_tensor(source))
        logits: NDArray[np.float32] = model(torch.tensor([list(ids)]), source=read)[0].numpy()
    return logits


def _stage(plan: CompilePlan) -> tuple[str, str]:
    """Stage and figure whose tolerance bounds what ships."""
    return ("compiled", "max_abs") if plan.precision.weight_bits is None else (plan.precision.name, "kl")
