"""What a bundle says of itself: manifest, certificate, account of the fusions, and the model's text side.

In: the source, the plan, the checks that passed. Out: the files beside the graph. It checks and compiles nothing.
"""

import dataclasses
import platform
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import torch

import graphport
from graphport.export.bundle import record_files, write_json
from graphport.export.graph_pass import CompilePlan
from graphport.export.model_kinds import kind_of
from graphport.export.source import SourceModel
from graphport.export.targets import CPU
from graphport.model_def.certificate import Check
from graphport.model_def.signature import (
    CERTIFICATE_FILE,
    CHAT_TEMPLATE_FILE,
    FUSIONS_FILE,
    MANIFEST_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Manifest,
)

CERTIFICATE_FORMAT = 1


def write_records(
    folder: Path,
    opened: SourceModel,
    plan: CompilePlan,
    account: dict[str, Any],
    checks: tuple[Check, ...] | None,
) -> Manifest:
    """Write everything but the graph: text side, account of the fusions, certificate unless `checks` is None, manifest.

    The manifest comes last: it records the others.
    """
    kind = kind_of(plan.config)
    for name, text in ((TOKENIZER_FILE, opened.tokenizer_json), (CHAT_TEMPLATE_FILE, opened.chat_template)):
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
    if opened.special_tokens:
        write_json(folder / TOKENIZER_CONFIG_FILE, dict(opened.special_tokens))
    write_json(folder / FUSIONS_FILE, account)
    if checks is not None:
        write_json(folder / CERTIFICATE_FILE, _certificate(opened, plan, checks))
    manifest = Manifest(
        graphport_version=graphport.__version__,
        kind=kind.name,
        target=plan.target.name,
        precision=plan.precision.name,
        max_length=plan.max_length,
        config=plan.config,
        signature=kind.shipped(plan),
        generation=opened.generation,
        source=opened.source,
        files=record_files(folder),
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def _certificate(opened: SourceModel, plan: CompilePlan, checks: tuple[Check, ...]) -> dict[str, Any]:
    return {
        "format": CERTIFICATE_FORMAT,
        "reference": {"source": opened.source, "torch": torch.__version__, "dtype": "float32"},
        "candidate": {
            "target": plan.target.name,
            "precision": plan.precision.name,
            "accuracy_level": plan.kernel_accuracy,
            "checked_precision": plan.precision.name if plan.target is CPU else "fp32",
            "checked_provider": CPU.provider,
            "onnxruntime": onnxruntime.__version__,
            "onnx_ir": ir.__version__,
            "machine": platform.machine(),
        },
        "checks": [{**dataclasses.asdict(check), "passed": check.passed} for check in checks],
    }
