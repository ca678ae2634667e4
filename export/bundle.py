"""A bundle on disk: graph, weights, tokenizer, manifest, account of the fusions, certificate.

In: a compiled graph and what belongs to it. Out: a folder that appears whole or not at all. It judges nothing (see
`parity.py`) and runs nothing.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphport.model_def.certificate import Check
from graphport.model_def.file_hashes import record_file
from graphport.model_def.signature import GRAPH_FILE, MANIFEST_FILE, WEIGHTS_FILE, FileRecord, Manifest

# Weights above this go to the data file; a graph of matrices this small stays far below protobuf's 2 GiB.
EXTERNAL_BYTES = 1024


class BundleError(ValueError):
    """A bundle folder that cannot be written as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """An exported model: its folder, manifest, fusions by rule, and the checks that it passed.

    Of two towers the manifest is the images' and `text_manifest` the texts'; fusions and checks are those of both.
    """

    path: Path
    manifest: Manifest
    fusions: dict[str, int]
    certificate: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    text_manifest: Manifest | None = None


def check_destination(out: Path, *, force: bool) -> None:
    """Raise BundleError when `out` is taken: an earlier bundle needs `force`, anything else is never replaced.

    Also when the folder that `out` would be made in is not one or is not writable.
    """
    place = out.resolve()
    if place.is_mount() or place == Path.cwd():
        kind = "a mount point" if place.is_mount() else "the current folder"
        raise BundleError(f"{place} is {kind}, which cannot be replaced; choose a folder in it: {out / 'bundle'}")
    place = next(folder for folder in out.absolute().parents if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        obstacle = "not writable" if place.is_dir() else "no folder"
        raise BundleError(f"{out} cannot be made: {place} is {obstacle}; choose another OUT")
    if not out.exists() and not out.is_symlink():
        return
    if out.is_dir() and not any(out.iterdir()):
        return
    if not (out / MANIFEST_FILE).is_file():
        raise BundleError(f"{out} exists and is no bundle; graphport does not replace it: choose another OUT")
    if not force:
        raise BundleError(
            f"{out} holds a bundle already; replace it with --force (in Python force=True) or choose another OUT"
        )


@contextlib.contextmanager
def bundle_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder beside `out` to write into; it becomes `out` on success and vanishes on failure.

    Raises BundleError when `out` is taken or its parent cannot be written.
    """
    check_destination(out, force=force)
    out = out.resolve()  # a link to a bundle stays a link: the bundle behind it is replaced
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise BundleError(f"{out} cannot be written: {error.strerror} ({out.parent}); choose another OUT") from error
    part.chmod(0o755)
    try:
        yield part
        check_destination(out, force=force)
        _put_in_place(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _put_in_place(part: Path, out: Path) -> None:
    """Rename `part` to `out`; what was at `out` is removed after that, and put back if that fails."""
    if not out.exists():
        part.replace(out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
    try:
        out.replace(old)
    except OSError:
        old.rmdir()
        raise
    try:
        part.replace(out)
    except OSError:
        old.replace(out)
        raise
    shutil.rmtree(old)


def write_graph(model: ir.Model, folder: Path) -> None:
    """Write `model.onnx` and `model.onnx.data` into a fresh folder; every tensor is stored once."""
    ir.save(model, folder / GRAPH_FILE, external_data=WEIGHTS_FILE, size_threshold_bytes=EXTERNAL_BYTES)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON data as UTF-8."""
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Size and SHA-256 of every file of a folder, by name."""
    return {path.name: record_file(path) for path in sorted(folder.iterdir())}
