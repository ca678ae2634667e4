"""A bundle exported anew without one of its fusions, for `graphport tune --against SOURCE` to measure.

In: a bundle and its source. Out: for each fusion that can be done without, its name and a function that exports the
rest. It measures nothing, and leaves the bundle as it is.
"""

import json
from collections.abc import Callable
from pathlib import Path

from graphport.export.model_export import export
from graphport.export.pipeline import OPTIONAL_RULES
from graphport.export.targets import CPU, TargetError
from graphport.model_def.signature import FUSIONS_FILE, read_manifest


def fusion_variants(bundle: Path, source: str, place: Path) -> tuple[tuple[str, Callable[[], Path]], ...]:
    """Name of each optional rule that fused something in `bundle`, and what exports `source` without it into `place`.

    Raises ManifestError, and TargetError for a bundle whose bits would be chosen anew. The functions raise what
    `export` raises, and TargetError when the source is another model.
    """
    manifest = read_manifest(bundle)
    if manifest.precision == "auto":
        raise TargetError(f"{bundle} has precision auto, whose bits would be chosen anew; leave --against out")
    account = json.loads((bundle / FUSIONS_FILE).read_text(encoding="utf-8"))
    disabled = tuple(account.get("disabled", ()))
    cache = next((cache.name for cache in CPU.caches if cache.dtype == manifest.cache_dtype), "auto")

    def without(rule: str) -> Path:
        made = export(
            source,
            place / rule,
            precision=manifest.precision,
            kv_cache=cache,
            context=manifest.max_length,
            accuracy_level=account.get("accuracy_level"),
            disable_passes=(*disabled, rule),
            verify=False,
        )
        if made.manifest.config != manifest.config:
            raise TargetError(f"{source} is another model than {bundle}: their configurations differ")
        return made.path

    def maker(rule: str) -> Callable[[], Path]:
        return lambda: without(rule)

    return tuple((rule, maker(rule)) for rule in OPTIONAL_RULES if account["counts"].get(rule, 0))
