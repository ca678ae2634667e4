"""The certificate of an export: the original's rows, and what the graph that ships gives on the same text.

In: an opened source, a plan, eager logits, the bundle's folder. Out: `Certificate`. What another target computes is not
run here; its certificate has the stages that the CPU can check, and `verify` runs the rest where the target is.
"""

import dataclasses
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from graphport.export.bundle import record_file
from graphport.export.cached_graph import CachedGraph
from graphport.export.certify import DecoderEvidence, check_shipped
from graphport.export.graph_pass import CompilePlan
from graphport.export.original import draft_certificate, limits_of
from graphport.export.source import SourceModel
from graphport.export.targets import CPU
from graphport.model_def.certificate import Certificate, Check, Surroundings, certified_files, error_series
from graphport.model_def.certified_runs import CachedModel, Emit, Run, planned_runs, play_runs, text_length
from graphport.model_def.processor import describe_processor
from graphport.model_def.signature import CERTIFICATE_FILE, GRAPH_FILE, MANIFEST_FILE, Manifest


def bundle_certificate(
    opened: SourceModel,
    plan: CompilePlan,
    evidence: DecoderEvidence,
    *,
    folder: Path,
    manifest: Manifest,
    stages: tuple[Check, ...],
    seed: int,
    observe: Callable[[str], None],
) -> Certificate:
    """Certify the graph in `folder`, whose files `manifest` lists, on the text and eager logits of `evidence`."""
    length = text_length(plan.config, plan.max_length)
    draft = draft_certificate(
        opened,
        evidence.reference[:length],
        evidence.ids[:length],
        max_length=plan.max_length,
        limits=limits_of(plan.precision, plan.cache),
        files=certified_files(manifest),
        candidate=describe_candidate(plan),
        seed=seed,
    )
    if plan.target is not CPU:
        layers = {} if evidence.layers is None else evidence.layers.found
        return dataclasses.replace(draft, checks=stages, layers=layers)
    whole: list[Check] = []

    def compare_whole(positions: Sequence[int], logits: NDArray[np.float32]) -> None:
        """The text in one piece is the prefill's last; it is compared while all of its rows are there."""
        if positions[-1] == length - 1:
            whole.append(check_shipped(plan, length, evidence.reference[list(positions)], logits))

    prefill, *others = planned_runs(plan.config, length)
    found = play_runs(
        CachedGraph(folder / GRAPH_FILE, plan.config, capacity=length, window_layers=manifest.window_layers),
        [_watched(prefill, compare_whole), *others],
        draft.ids,
        original=draft.original,
        shipped={},
        limits=draft.limits,
        observe=lambda run: observe(f"parity of the bundle: {run}"),
        keep_rows=True,
    )
    if evidence.layers is not None:
        observe("errors by layer")
        evidence.layers.measure("the graph that ships", folder, plan)
        draft = dataclasses.replace(draft, layers=evidence.layers.found)
    return dataclasses.replace(
        draft, checks=(*stages, *whole, *found.checks), shipped=found.rows, errors=error_series(found.errors)
    )


def _watched(run: Run, watch: Emit) -> Run:
    """`run`, whose rows are shown to `watch` too."""

    def play(model: CachedModel, ids: NDArray[np.int64], emit: Emit) -> None:
        def show(positions: Sequence[int], logits: NDArray[np.float32]) -> None:
            watch(positions, logits)
            emit(positions, logits)

        run.play(model, ids, show)

    return dataclasses.replace(run, play=play)


def add_certificate(folder: Path, manifest: Manifest, certificate: Certificate) -> Manifest:
    """Write the certificate into `folder` and list it in the manifest there, which is returned."""
    path = folder / CERTIFICATE_FILE
    path.write_text(certificate.to_json(), encoding="utf-8")
    files = dict(sorted({**manifest.files, path.name: record_file(path)}.items()))
    listed = dataclasses.replace(manifest, files=files)
    (folder / MANIFEST_FILE).write_text(listed.to_json(), encoding="utf-8")
    return listed


def describe_candidate(plan: CompilePlan) -> dict[str, Any]:
    """What was compared with the original, and on what."""
    here = Surroundings(provider=CPU.provider, onnxruntime=onnxruntime.__version__, processor=describe_processor())
    return {
        "target": plan.target.name,
        "precision": plan.precision.name,
        "accuracy_level": plan.kernel_accuracy,
        "kv_cache": plan.cache_dtype if plan.cache is None else plan.cache.name,
        "checked_precision": plan.precision.name if plan.target is CPU else "fp32",
        **dataclasses.asdict(here),
        "onnx_ir": ir.__version__,
        "machine": platform.machine(),
    }
