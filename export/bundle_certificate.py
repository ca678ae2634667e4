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

from graphport.export.cached_graph import CachedGraph
from graphport.export.graph_pass import CompilePlan
from graphport.export.original import draft_certificate, limits_of
from graphport.export.source import SourceModel
from graphport.export.targets import CPU
from graphport.model_def.certificate import Certificate, Check, Surroundings, error_series
from graphport.model_def.certified_runs import planned_runs, play_runs, text_length
from graphport.model_def.processor import processor_kind
from graphport.model_def.signature import GRAPH_FILE


def bundle_certificate(
    opened: SourceModel,
    plan: CompilePlan,
    reference: NDArray[np.float32],
    ids: Sequence[int],
    *,
    folder: Path,
    files: dict[str, str],
    stages: tuple[Check, ...],
    seed: int,
    observe: Callable[[str], None],
) -> Certificate:
    """Certify the graph in `folder` on `ids` with eager logits `reference` [S, V]; `files` are the bundle's hashes."""
    length = text_length(plan.config, plan.max_length)
    draft = draft_certificate(
        opened,
        reference[:length],
        ids[:length],
        max_length=plan.max_length,
        limits=limits_of(plan.precision, plan.cache),
        files=files,
        candidate=describe_candidate(plan),
        seed=seed,
    )
    if plan.target is not CPU:
        return dataclasses.replace(draft, checks=stages)
    evidence = play_runs(
        CachedGraph(folder / GRAPH_FILE, plan.config, capacity=length),
        planned_runs(plan.config, length),
        draft.ids,
        original=draft.original,
        shipped={},
        limits=draft.limits,
        observe=lambda run: observe(f"parity of the bundle: {run}"),
        keep_rows=True,
    )
    return dataclasses.replace(
        draft, checks=(*stages, *evidence.checks), shipped=evidence.rows, errors=error_series(evidence.errors)
    )


def describe_candidate(plan: CompilePlan) -> dict[str, Any]:
    """What was compared with the original, and on what."""
    here = Surroundings(provider=CPU.provider, onnxruntime=onnxruntime.__version__, processor=processor_kind())
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
