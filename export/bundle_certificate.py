"""The certificate of an export: the original's rows, and what the graph that ships gives on the same text.

In: an opened source, a plan, its evidence, the bundle's folder. Out: `Certificate`. What another target computes is not
run here; its certificate has the stages that the CPU can check, and `verify` runs the rest where the target is.
"""

import dataclasses
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime

from graphport.export.graph_pass import CompilePlan
from graphport.export.model_kinds import KindEvidence
from graphport.export.original import draft_certificate
from graphport.export.source import SourceModel
from graphport.export.targets import CPU
from graphport.model_def.certificate import Certificate, Check, Surroundings, certified_files, error_series
from graphport.model_def.file_hashes import record_file
from graphport.model_def.processor import describe_processor
from graphport.model_def.signature import CERTIFICATE_FILE, MANIFEST_FILE, Manifest


def bundle_certificate(
    opened: SourceModel,
    plan: CompilePlan,
    evidence: KindEvidence,
    *,
    folder: Path,
    manifest: Manifest,
    stages: tuple[Check, ...],
    observe: Callable[[str], None],
) -> Certificate:
    """Certify the graph in `folder`, whose files `manifest` lists, on what `evidence` is about."""
    limits = evidence.limits(plan)
    draft = draft_certificate(
        opened, evidence, limits=limits, files=certified_files(manifest), candidate=describe_candidate(plan)
    )
    if plan.target is not CPU:
        return dataclasses.replace(draft, checks=stages, layers=evidence.layers, conditioning=evidence.conditioning())
    whole, found = evidence.play(plan, folder=folder, limits=limits, observe=observe)
    return dataclasses.replace(
        draft,
        checks=(*stages, *whole, *found.checks),
        shipped=found.rows,
        errors=error_series(found.errors),
        layers=evidence.layers,
        conditioning=evidence.conditioning(),
    )


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
