"""What an export was asked for besides its source and its place.

In: the arguments of `export`, which say what each means. Out: one record. It checks nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """See `graphport.export.export`."""

    target: str
    precision: str | None
    kv_cache: str
    context: int | None
    image_size: tuple[int, int] | None
    accuracy_level: int | None
    calibration: str | Path | None
    max_kl: float | None
    seed: int
    verify: bool
    require_fused: Mapping[str, int | Literal["all"]]
    require_exact: bool
    disable_passes: tuple[str, ...]
    layouts: tuple[str, ...]
    force: bool
    progress: Callable[[str], None]
