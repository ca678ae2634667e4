"""Open a bundle folder safely: everything that ONNX Runtime will read is checked before it reads it.

In: a path. Out: `BundleFiles` with absolute paths, the manifest and the graph's versions. It opens no session, hashes
nothing (`graphport verify` does) and does not guard against files that change between the check and the reading.
"""

import dataclasses
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphport.model_def.signature import (
    ENCODER_GRAPH_FILE,
    ENCODER_WEIGHTS_FILE,
    GRAPH_FILE,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    FileRecord,
    Manifest,
    ManifestError,
    read_manifest,
    source_signature,
)
from graphport.runtime.graph_file import GraphHeader, Place, read_graph_header

_READ_BY_ORT = (GRAPH_FILE, WEIGHTS_FILE, ENCODER_GRAPH_FILE, ENCODER_WEIGHTS_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFiles:
    """A checked bundle: absolute folder and graph path, its manifest, its graph's header.

    `encoder`: the other graph of an encoder-decoder, as if it were a bundle of its own. `weights`: the file beside the
    graph.
    """

    folder: Path
    graph: Path
    manifest: Manifest
    header: GraphHeader
    weights: str = WEIGHTS_FILE
    encoder: "BundleFiles | None" = None

    @property
    def weights_bytes(self) -> int:
        """Size of the graph and weights files together."""
        names = (self.graph.name, self.weights)
        return sum(self.manifest.files[name].size for name in names if name in self.manifest.files)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the bundle can turn text into ids."""
        return TOKENIZER_FILE in self.manifest.files


def open_bundle(path: str | os.PathLike[str]) -> BundleFiles:
    """Check the bundle at `path` and return its files.

    Refused before anything reads them: files missing or of another size than the manifest states, files that are not
    regular (FIFO, device), links that leave the folder, and weights with a second hard link (the same rule as the onnx
    package's own loader: a hard link made by an archive points anywhere and cannot be told from a copy), and
    external tensors anywhere but inside the bundle's own weights file. The folder itself may be a link.

    Raises ManifestError when it is no bundle or a file is missing or changed, ValueError for what it must not read.
    """
    folder = Path(path).resolve()
    manifest = read_manifest(folder)
    if GRAPH_FILE not in manifest.files:
        raise ManifestError(f"{folder / MANIFEST_FILE} lists no {GRAPH_FILE}; export the bundle again")
    graph, header = check_graph(folder, GRAPH_FILE, manifest.files)
    encoder = None if manifest.config.encoder is None else _open_encoder(folder, manifest)
    return BundleFiles(folder=folder, graph=graph, manifest=manifest, header=header, encoder=encoder)


def _open_encoder(folder: Path, manifest: Manifest) -> BundleFiles:
    """The encoder's graph, its manifest what the encoder alone would have."""
    config = manifest.config.encoder
    assert config is not None
    if ENCODER_GRAPH_FILE not in manifest.files:
        raise ManifestError(f"{folder / MANIFEST_FILE} lists no {ENCODER_GRAPH_FILE}; export the bundle again")
    graph, header = check_graph(folder, ENCODER_GRAPH_FILE, manifest.files, weights=ENCODER_WEIGHTS_FILE)
    own = dataclasses.replace(
        manifest,
        kind="encoder",
        config=config,
        max_length=config.max_positions,
        signature=source_signature(manifest.config, manifest.cache_dtype or "float32"),
    )
    return BundleFiles(folder=folder, graph=graph, manifest=own, header=header, weights=ENCODER_WEIGHTS_FILE)


def check_graph(
    folder: Path, name: str, files: Mapping[str, FileRecord], *, weights: str = WEIGHTS_FILE
) -> tuple[Path, GraphHeader]:
    """Check the `files` in `folder`, and that the graph called `name` among them reads nothing else but `weights`.

    Raises ManifestError when a file is missing or changed, ValueError for what must not be read.
    """
    for file, record in files.items():
        _check_file(folder, file, record.size)
    graph = folder / name
    header = read_graph_header(graph)
    size = files[weights].size if weights in files else None
    for place in header.external:
        _check_place(graph, place, weights, size)
    return graph, header


def _check_file(folder: Path, name: str, size: int) -> None:
    if name != Path(name).name or name in ("", ".", ".."):
        raise ValueError(f"{folder / MANIFEST_FILE} lists {name!r}; a bundle's files lie directly in its folder")
    path = folder / name
    target = path.resolve()
    if target.parent != folder:
        raise ValueError(f"{path} links to {target}, outside the bundle; replace the link by a copy of the file")
    try:
        status = target.stat()
    except FileNotFoundError as error:
        raise ManifestError(
            f"{path} is missing; the manifest lists it, restore it or export the bundle again"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file; replace it by a copy of the file")
    if status.st_nlink > 1 and name in _READ_BY_ORT:
        raise ValueError(
            f"{path} has {status.st_nlink} hard links, so it may be a file from elsewhere; copy the bundle"
        )
    if status.st_size != size:
        raise ManifestError(
            f"{path} has {status.st_size} bytes, the manifest says {size}; it is torn or was changed, "
            "export the bundle again"
        )


def _check_place(graph: Path, place: Place, weights: str, size: int | None) -> None:
    if place.location != weights:
        raise ValueError(
            f"{graph} reads tensor data from {place.location!r}; a bundle's graph may read only its own {weights}"
        )
    if size is None:
        raise ManifestError(f"{graph} needs {weights}, which the manifest does not list; export the bundle again")
    length = place.length or 0
    if place.offset < 0 or length < 0 or place.offset + length > size:
        raise ValueError(
            f"{graph} reads bytes {place.offset} to {place.offset + length} of {weights}, which has {size}; "
            "export the bundle again"
        )
