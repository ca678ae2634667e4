"""A source with two towers as one bundle: a bundle of each, and how their vectors compare.

In: an opened source whose `text` is the other tower. Out: a folder with `text/`, `images/` and a manifest that joins
them. Each tower goes the way of every model (see `model_export.py`), certificate included.
"""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Protocol

import graphport
from graphport.export.bundle import Bundle, bundle_folder
from graphport.export.export_options import ExportOptions
from graphport.export.source import SourceModel
from graphport.model_def.certificate import Check
from graphport.model_def.signature import MANIFEST_FILE
from graphport.model_def.towers import IMAGES_FOLDER, TEXT_FOLDER, Towers


class ExportsOne(Protocol):
    """Exports a source of one tower."""

    def __call__(self, opened: SourceModel, out: Path, options: ExportOptions) -> Bundle: ...  # noqa: D102 - above


def export_towers(opened: SourceModel, out: Path, options: ExportOptions, *, export_one: ExportsOne) -> Bundle:
    """Export both towers; the context and the size asked for are the images', a calibration text is the texts'.

    Raises what `export` raises, and leaves nothing at `out` then.
    """
    assert opened.text is not None
    assert opened.similarity is not None
    own = dataclasses.replace(options, calibration=None)
    others = dataclasses.replace(options, context=None, image_size=None)
    towers = Towers(graphport_version=graphport.__version__, similarity=opened.similarity, source=dict(opened.source))
    with bundle_folder(out, force=options.force) as folder:
        images = export_one(opened, folder / IMAGES_FOLDER, own)
        text = export_one(opened.text, folder / TEXT_FOLDER, others)
        (folder / MANIFEST_FILE).write_text(towers.to_json(), encoding="utf-8")
    return Bundle(
        path=out,
        manifest=images.manifest,
        text_manifest=text.manifest,
        fusions=dict(Counter(images.fusions) + Counter(text.fusions)),
        certificate=(*_named(IMAGES_FOLDER, images.certificate), *_named(TEXT_FOLDER, text.certificate)),
        notes=(*(f"{IMAGES_FOLDER}: {note}" for note in images.notes), *(f"{TEXT_FOLDER}: {n}" for n in text.notes)),
    )


def _named(tower: str, checks: tuple[Check, ...]) -> tuple[Check, ...]:
    return tuple(dataclasses.replace(check, name=f"{tower}: {check.name}") for check in checks)
