"""What a bundle says of itself: manifest, account of the fusions, and the model's text side.

In: the source, the plan. Out: the files beside the graph, but the certificate (see `bundle_certificate.py`). It
checks and compiles nothing.
"""

from pathlib import Path
from typing import Any

import graphport
from graphport.export.bundle import record_files, write_json
from graphport.export.graph_pass import CompilePlan
from graphport.export.model_kinds import kind_of
from graphport.export.source import SourceModel
from graphport.model_def.signature import (
    CHAT_TEMPLATE_FILE,
    FUSIONS_FILE,
    MANIFEST_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Manifest,
)


def write_records(
    folder: Path,
    opened: SourceModel,
    plan: CompilePlan,
    account: dict[str, Any],
) -> Manifest:
    """Write everything but the graph and the certificate: text side, account of the fusions, manifest.

    The manifest comes last: it records the others.
    """
    kind = kind_of(plan.config)
    for name, text in ((TOKENIZER_FILE, opened.tokenizer_json), (CHAT_TEMPLATE_FILE, opened.chat_template)):
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
    if opened.special_tokens:
        write_json(folder / TOKENIZER_CONFIG_FILE, dict(opened.special_tokens))
    write_json(folder / FUSIONS_FILE, account)
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
