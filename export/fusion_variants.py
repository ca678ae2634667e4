"""A bundle exported anew without some of its fusions, for `graphport tune --against SOURCE` to measure and to keep.

In: a bundle and its source. Out: the fusions that can be done without, bundles beside it without them, and, when it is
told so, such a bundle in its place. It measures nothing.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graphport.export.bundle import Bundle
from graphport.export.layouts import LAYOUTS
from graphport.export.model_export import export
from graphport.export.pipeline import OPTIONAL_RULES
from graphport.export.targets import CPU, TargetError
from graphport.model_def.signature import FUSIONS_FILE, ManifestError, read_manifest


class FusionVariants:
    """`bundle` without some of the optional rules that fused something in it, `rules`, exported from `source`.

    Raises ManifestError, and TargetError for a bundle whose weights would not be those that it has.
    """

    def __init__(
        self, bundle: Path, source: str, place: Path, *, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        self._bundle, self._source, self._place = bundle, source, place / "variant"
        self._progress = progress
        self._manifest = manifest = read_manifest(bundle)
        account, counts = _account(bundle)
        if manifest.precision == "auto":
            raise TargetError(f"{bundle} has precision auto, whose bits would be chosen anew; leave --against out")
        if account.get("calibration"):
            raise TargetError(
                f"{bundle} was calibrated on {account['calibration']}, which it does not hold, so its weights would be "
                "rounded otherwise; leave --against out"
            )
        self.rules = tuple(rule for rule in OPTIONAL_RULES if counts.get(rule, 0))
        self._disabled = tuple(account.get("disabled", ()))
        cache = next((cache.name for cache in CPU.caches if cache.dtype == manifest.cache_dtype), "auto")
        self._options: dict[str, Any] = {
            "precision": manifest.precision,
            "kv_cache": cache,
            "context": manifest.max_length,
            "accuracy_level": account.get("accuracy_level"),
        }

    def without(self, rules: Sequence[str]) -> Path:
        """A bundle without `rules` and without a certificate, in place of the one before.

        Raises what `export` raises, and TargetError.
        """
        shutil.rmtree(self._place, ignore_errors=True)  # the one before: who has it open keeps it, the disk need not
        made = self._exported(self._place / "-".join(rules), rules, verify=False)
        if made.manifest.config != self._manifest.config:
            raise TargetError(
                f"{self._source} is another model than {self._bundle}: their configurations differ; "
                "give the SOURCE that the bundle was exported from"
            )
        return made.path

    def drop(self, rules: Sequence[str]) -> None:
        """Put the bundle without `rules`, certified, in the place of the bundle, with the layouts that it has.

        It is written beside it and renamed, so that it is there whole or stays as it was. Raises what `export` raises.
        """
        layouts = [layout.name for layout in LAYOUTS if layout.graph_file in self._manifest.files]
        self._exported(self._bundle, rules, force=True, layouts=layouts, progress=self._progress)

    def _exported(self, out: Path, rules: Sequence[str], **options: Any) -> Bundle:  # noqa: ANN401 - options of export
        disabled = (*self._disabled, *rules)
        return export(self._source, out, **self._options, disable_passes=disabled, **options)


def _account(bundle: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """What `fusions.json` says, and its counts by rule. Raises ManifestError."""
    path = bundle / FUSIONS_FILE
    try:
        account: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return account, dict(account["counts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{path} is missing or damaged ({error}); restore it, or leave --against out") from error
