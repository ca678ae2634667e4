"""Two encoders whose vectors lie in one space, as one bundle: a bundle of each, and how the vectors compare.

In: a folder. Out: `Towers`, or None for a bundle of one model. Torch-free; the two bundles have manifests of their own
(see `signature.py`).
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from graphport.model_def.readout_config import SimilarityConfig
from graphport.model_def.signature import MANIFEST_FILE, MANIFEST_FORMAT, TOWERS_KIND, ManifestError, read_manifest

TEXT_FOLDER, IMAGES_FOLDER = "text", "images"


@dataclass(frozen=True, slots=True, kw_only=True)
class Towers:
    """What joins two bundles. `source`: where the weights of both came from (format, name, SHA-256)."""

    graphport_version: str
    similarity: SimilarityConfig
    source: dict[str, str]

    def to_json(self) -> str:
        """The text of the manifest that joins them."""
        return json.dumps({"format": MANIFEST_FORMAT, "kind": TOWERS_KIND, **dataclasses.asdict(self)}, indent=1)


def find_towers(folder: Path) -> Towers | None:
    """What joins the two bundles in `folder`, None where it is no such folder.

    Raises ManifestError when the manifest is torn or a tower is of another source.
    """
    path = folder / MANIFEST_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(data, dict) or data.pop("kind", None) != TOWERS_KIND:
            return None
    except ValueError:  # said by `read_manifest`, which every other bundle is read with
        return None
    try:
        written = data.pop("format")
        if written != MANIFEST_FORMAT:
            raise ManifestError(
                f"{path} has format {written}, this graphport reads {MANIFEST_FORMAT}; export the bundle again"
            )
        towers = Towers(similarity=SimilarityConfig(**data.pop("similarity")), **data)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ManifestError):
            raise
        raise ManifestError(f"{path} is damaged ({error}); export the bundle again") from error
    for name in (TEXT_FOLDER, IMAGES_FOLDER):
        part = folder / name
        if part.resolve().parent != folder.resolve():
            raise ManifestError(f"{part} links to a folder outside the bundle; replace the link by a copy")
        if read_manifest(part).source != towers.source:
            raise ManifestError(f"{part} was exported from another source than {path} says; export the bundle again")
    return towers


def bundles_in(folder: Path) -> dict[str, Path]:
    """The bundles of one model each in `folder`: of two towers by name, otherwise the folder itself under no name.

    Raises ManifestError as `find_towers`.
    """
    if find_towers(folder) is None:
        return {"": folder}
    return {name: folder / name for name in (TEXT_FOLDER, IMAGES_FOLDER)}
