"""What the runs of a certificate feed, by kind of model: one text, several texts, seeded images, sources and a text.

In: ids, sizes of images, numbers of recordings. Out: records and their JSON, checked against a configuration. It
tokenizes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import Kind
from graphport.model_def.vision_config import Size

MOST_RECORDINGS = 16  # of a certificate that is read


class Row(NamedTuple):
    """One text of an encoder: ids [S] and the type of each token [S]."""

    ids: tuple[int, ...]
    types: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInputs:
    """A decoder's text: its ids, and where they come from in words."""

    kind: ClassVar[Kind] = "decoder"
    origin: str
    ids: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"origin": self.origin, "ids": list(self.ids)}

    def problem(self, config: TransformerConfig) -> str | None:
        """Why a model of `config` cannot read them."""
        return _ids_problem(config, [self.ids])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInputs:
    """An encoder's texts, of several lengths."""

    kind: ClassVar[Kind] = "encoder"
    origin: str
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "origin": self.origin,
            "rows": [list(row.ids) for row in self.rows],
            "types": [list(row.types) for row in self.rows],
        }

    def problem(self, config: TransformerConfig) -> str | None:
        """Why a model of `config` cannot read them."""
        kinds = max(config.token_types, 1)
        for row in self.rows:
            if len(row.types) != len(row.ids) or not all(0 <= number < kinds for number in row.types):
                return "has token types that the model lacks"
        return _ids_problem(config, [row.ids for row in self.rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInputs:
    """An image encoder's images: some of each size (see `seeded_images.py`)."""

    kind: ClassVar[Kind] = "image_encoder"
    origin: str
    seed: int
    sizes: tuple[Size, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"origin": self.origin, "seed": self.seed, "sizes": [list(size) for size in self.sizes]}

    def problem(self, config: TransformerConfig) -> str | None:
        """Why a model of `config` cannot read them."""
        if config.image is None or not self.sizes:
            return "is for images, or for none"
        problems = [config.image.size_problem(*size) for size in self.sizes]
        return next((f"has images that do not fit: {words}" for words in problems if words), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInputs:
    """An encoder-decoder's sources, and the ids of the text that its decoder reads after each.

    `sources`: ids of each, none of a model that hears; that has `num_recordings` (see `seeded_sources.py`).
    """

    kind: ClassVar[Kind] = "encoder_decoder"
    origin: str
    seed: int
    sources: tuple[tuple[int, ...], ...]
    num_recordings: int
    ids: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "origin": self.origin,
            "seed": self.seed,
            "sources": [list(source) for source in self.sources],
            "num_recordings": self.num_recordings,
            "ids": list(self.ids),
        }

    def problem(self, config: TransformerConfig) -> str | None:
        """Why a model of `config` cannot read them."""
        encoder = config.encoder
        hears = encoder is not None and encoder.audio is not None
        if encoder is None or hears != (self.num_recordings > 0) or hears == bool(self.sources) or self.seed < 0:
            return "is for sources of another kind, or for none"
        if any(len(source) > encoder.max_positions for source in self.sources):
            return "has sources longer than the model reads"
        if self.num_recordings > MOST_RECORDINGS:
            return f"has {self.num_recordings} recordings, more than any certificate ({MOST_RECORDINGS})"
        return (None if hears else _ids_problem(encoder, list(self.sources))) or _ids_problem(config, [self.ids])


Inputs = TextInputs | RowInputs | ImageInputs | SourceInputs


def read_inputs(kind: Kind, data: Mapping[str, Any]) -> Inputs:
    """The record that `to_dict` wrote for a model of `kind`. Raises KeyError, TypeError or ValueError for others."""
    origin = str(data["origin"])
    if kind == "decoder":
        return TextInputs(origin=origin, ids=_ids(data["ids"]))
    if kind == "encoder":
        pairs = zip(data["rows"], data["types"], strict=True)
        return RowInputs(origin=origin, rows=tuple(Row(_ids(ids), _ids(types)) for ids, types in pairs))
    if kind == "encoder_decoder":
        return SourceInputs(
            origin=origin,
            seed=int(data["seed"]),
            sources=tuple(map(_ids, data["sources"])),
            num_recordings=int(data["num_recordings"]),
            ids=_ids(data["ids"]),
        )
    sizes = tuple((int(height), int(width)) for height, width in data["sizes"])
    return ImageInputs(origin=origin, seed=int(data["seed"]), sizes=sizes)


def _ids(numbers: list[int]) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers)


def _ids_problem(config: TransformerConfig, texts: list[tuple[int, ...]]) -> str | None:
    if not texts or not all(texts):
        return "is for another vocabulary or no text"
    if not all(0 <= token < config.vocab_size for ids in texts for token in ids):
        return "has ids beyond the vocabulary"
    return None
