"""The metadata under an architecture's name, read key by key.

In: a parsed `GgufFile`. Out: numbers and lists, checked; which keys were read. It interprets none of them (see
`gguf_config.py`).
"""

from dataclasses import dataclass, field
from typing import Any

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.gguf_file import GgufFile


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufKeys:
    """The metadata under the architecture's name; remembers which keys were read."""

    file: GgufFile
    prefix: str
    read: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - the file types it
        """The value as the file types it."""
        self.read.add(key)
        return self.file.metadata.get(f"{self.prefix}.{key}", default)

    def number(self, key: str) -> float | None:
        """A number, None when the key is absent; raises CheckpointError for anything else."""
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise CheckpointError(f"{self.file.path}: {self.prefix}.{key} must be a number, got {value!r:.80}")
        return value

    def integer(self, key: str) -> int:
        """A positive integer that must be there; raises CheckpointError otherwise."""
        return self.per_layer(key, 1)[0]

    def per_layer(self, key: str, num_layers: int, default: int | None = None) -> list[int]:
        """A positive integer a layer, from one number or a list; raises CheckpointError otherwise."""
        value = self.get(key, default)
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers or not all(type(item) is int and item > 0 for item in values):
            raise CheckpointError(
                f"{self.file.path}: {self.prefix}.{key} must be a positive integer or a list of {num_layers}; "
                f"got {value!r:.200}"
            )
        return values
