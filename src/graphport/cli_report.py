"""What a bundle says about itself: read from its files, printed as tables or as JSON.

In: a bundle folder. Out: a `Report`, text on stderr. It verifies and runs nothing; torch-free.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from graphport.cli_tables import CheckRow, print_bundle, print_line, print_notes, print_table
from graphport.model_def.readout_config import PoolingConfig
from graphport.model_def.signature import CERTIFICATE_FILE, FUSIONS_FILE, TUNING_FILE, Manifest, read_manifest
from graphport.model_def.whole_files import write_text
from graphport.report_page import report_page

_CACHE_NAMES = {"uint8": "int4", "float8e4m3fn": "fp8"}  # where `--kv-cache` calls an element type otherwise
_ACCURACY = {0: "0: activations as they are", 4: "4: activations rounded to 8 bits"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """How a matrix of a GGUF file is held: its type there, its form here, the largest change of a value."""

    name: str
    source: str
    form: str
    exact: bool
    max_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """The form chosen for matrices that read one input, and the divergence in nats when they alone have 4 bits."""

    names: tuple[str, ...]
    form: str
    sensitivity: float | None
    num_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRow:
    """What precision auto chose: the budget, what was measured on how many tokens, the graphs tried, every group."""

    max_kl: float
    kl: float
    num_tokens: int
    num_bytes: int
    probes: tuple[dict[str, Any], ...]
    groups: tuple[GroupRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a bundle says about itself; `checks` is None when it was exported without a certificate.

    `matrices` are those of a GGUF file in precision gguf; `accuracy_level` is how quantised matrices are multiplied;
    `choice` is that of precision auto. `conditioning`: in words, what float32 itself loses in an ill-conditioned model,
    by which its limits were set. `tuning` is what `tune` measured, None without, and `tuning_problem` why it is
    not heeded here.
    """

    path: Path
    manifest: Manifest
    fusions: dict[str, int]
    advice: tuple[str, ...]
    matrices: tuple[MatrixRow, ...]
    accuracy_level: int | None
    choice: ChoiceRow | None
    checks: tuple[CheckRow, ...] | None
    conditioning: str | None = None
    tuning: dict[str, Any] | None = None
    tuning_problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data of every field; checks are null without a certificate."""
        return {
            "path": str(self.path),
            "manifest": json.loads(self.manifest.to_json()),
            "fusions": self.fusions,
            "advice": self.advice,
            "matrices": [asdict(row) for row in self.matrices],
            "accuracy_level": self.accuracy_level,
            "choice": None if self.choice is None else asdict(self.choice),
            "checks": None if self.checks is None else [row.to_dict() for row in self.checks],
            "conditioning": self.conditioning,
            "tuning": self.tuning,
            "tuning_problem": self.tuning_problem,
        }


def read_report(folder: Path) -> Report:
    """Read manifest, fusions and certificate of a bundle; raises ValueError when a file is torn."""
    manifest = read_manifest(folder)
    account = _read_json(folder / FUSIONS_FILE)
    certificate = _read_json(folder / CERTIFICATE_FILE)
    account = {"counts": {}} if account is None else account
    try:
        counts = {str(rule): int(count) for rule, count in account["counts"].items()}
        advice = tuple(map(str, account.get("advice", ())))
        matrices = tuple(MatrixRow(**row) for row in account.get("matrices", ()))
        choice = _read_choice(account.get("choice"))
        checks = None if certificate is None else tuple(map(_check_row, certificate["checks"]))
        measured = None if certificate is None else certificate.get("conditioning")
        conditioning = None if measured is None else str(measured["words"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder}: {FUSIONS_FILE} or {CERTIFICATE_FILE} is damaged ({error}); export again"
        ) from error
    tuning, problem = _read_tuning(folder)
    return Report(
        path=folder,
        manifest=manifest,
        fusions=counts,
        advice=advice,
        matrices=matrices,
        accuracy_level=account.get("accuracy_level"),
        choice=choice,
        checks=checks,
        conditioning=conditioning,
        tuning=tuning,
        tuning_problem=problem,
    )


def _read_tuning(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """What was tuned, with the choice in words, or why it is not heeded here."""
    if not (folder / TUNING_FILE).is_file():
        return None, None
    from graphport.runtime.bundle_files import open_bundle
    from graphport.runtime.tuning import Tuning, find_tuning

    found = find_tuning(open_bundle(folder))
    if not isinstance(found, Tuning):
        return None, found
    dropped = f"; exported again without {', '.join(found.dropped)}" if found.dropped else ""
    return {**found.to_dict(), "words": found.choice.words() + dropped}, None


def _check_row(check: dict[str, Any]) -> CheckRow:
    names = ("name", "measured", "tolerance", "passed", "detail")
    return CheckRow(**{name: check[name] for name in names}, inputs=check.get("inputs", ""))


def print_report(report: Report) -> None:
    """All tables of a bundle."""
    manifest = report.manifest
    table = Table("bundle", escape(str(report.path)))
    for name, value in _facts(report):
        table.add_row(escape(name), escape(value))
    print_table(table)
    print_bundle(manifest.files, report.fusions, report.checks or ())
    print_matrices(report.matrices)
    if report.choice is not None:
        print_choice(report.choice)
    others = (report.conditioning, report.tuning_problem)
    print_notes((*report.advice, *(note for note in others if note is not None)))
    if report.checks is None:
        print_line("no certificate: it was exported with --no-verify")
    elif manifest.target != "cpu":
        print_line(f"the checks ran in fp32 on the CPU, not in {manifest.precision} on {manifest.target}")


def _facts(report: Report) -> tuple[tuple[str, str], ...]:
    """What a bundle is, by name."""
    manifest = report.manifest
    return (
        ("target", manifest.target),
        ("precision", manifest.precision),
        *(() if (level := report.accuracy_level) is None else (("accuracy level", _ACCURACY[level]),)),
        ("kind", manifest.kind),
        *(() if (dtype := manifest.cache_dtype) is None else (("KV cache", _CACHE_NAMES.get(dtype, dtype)),)),
        *(() if (head := manifest.config.classifier) is None else (("labels", ", ".join(head.labels)),)),
        *(() if (pooling := manifest.config.pooling) is None else (("pooling", _pooling(pooling)),)),
        *_limits(manifest),
        ("layers", str(manifest.config.num_layers)),
        *((f"source {key}", value) for key, value in manifest.source.items()),
        *(() if report.tuning is None else (("tuned here", report.tuning["words"]),)),
        ("graphport", manifest.graphport_version),
    )


def _limits(manifest: Manifest) -> list[tuple[str, str]]:
    """What a bundle takes: texts and ids, or images."""
    image = manifest.config.image
    if image is None:
        return [("longest text", f"{manifest.max_length} tokens"), ("vocabulary", str(manifest.config.vocab_size))]
    labels = image.readout.labels if image.readout else ()
    read_out = [("labels", ", ".join(labels))] if labels else []
    if image.fixed_size is not None:
        return [*read_out, ("images", f"{image.fixed_size[0]} x {image.fixed_size[1]}")]
    return [
        *read_out,
        ("images", f"multiples of {image.patch_size[0]} x {image.patch_size[1]}, at most {manifest.max_length} tokens"),
        ("trained on", f"{image.native_size[0]} x {image.native_size[1]}"),
    ]


def write_page(report: Report, path: Path, *, with_times: bool) -> None:
    """Write the HTML page to `path`, whole or not at all. Raises ValueError where it cannot be written."""
    if not path.parent.is_dir() or path.is_dir():
        problem = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.parent}"
        raise ValueError(f"--html {path} {problem}; name a file in a folder that exists")
    times: list[dict[str, Any]] = []
    if with_times:
        from graphport.runtime.bundle_files import open_bundle
        from graphport.runtime.op_times import measure_ops

        times = [asdict(time) for time in measure_ops(open_bundle(report.path))]
    account = _read_json(report.path / FUSIONS_FILE) or {}
    certificate = _read_json(report.path / CERTIFICATE_FILE)
    text = report_page(report.to_dict(), _facts(report), account, certificate, times)
    write_text(path, text)


def _pooling(pooling: PoolingConfig) -> str:
    width = "" if pooling.width is None else f", projected to {pooling.width}"
    return pooling.kind + width + (", normalised" if pooling.normalize else "")


def print_matrices(matrices: Sequence[MatrixRow]) -> None:
    """One row for the matrices of one place, type and form in all layers: how many, and the largest change."""
    if not matrices:
        return
    table = Table("matrix", "count", "file", "bundle", "largest change")
    table.columns[1].justify = "right"
    groups: dict[tuple[str, str, str], list[MatrixRow]] = {}
    for row in matrices:
        groups.setdefault((_place(row.name), row.source, row.form), []).append(row)
    for (name, source, form), rows in groups.items():
        change = f"[bold]{max(row.max_error for row in rows):.3g}, encoded anew[/]"
        kept = "[green]exact[/]" if all(row.exact for row in rows) else change
        table.add_row(escape(name), str(len(rows)), escape(source), escape(form), kept)
    print_table(table)


def print_choice(choice: ChoiceRow) -> None:
    """One row for the groups of one place and form in all layers: how many, their size and how sensitive they are."""
    table = Table("chosen for", "count", "form", "size", "KL at 4 bits, each")
    for index in (1, 3):
        table.columns[index].justify = "right"
    groups: dict[tuple[str, str], list[GroupRow]] = {}
    for row in choice.groups:
        first, *others = map(_place, row.names)
        groups.setdefault((", ".join([first, *(name.split(".")[-1] for name in others)]), row.form), []).append(row)
    for (names, form), rows in sorted(groups.items()):
        costs = [row.sensitivity for row in rows if row.sensitivity is not None]
        span = f"{min(costs):.2g} to {max(costs):.2g}" if costs else "not smaller"
        size = f"{sum(row.num_bytes for row in rows) / 1e6:.1f} MB"
        table.add_row(escape(names), str(len(rows)), escape(form), size, span)
    print_table(table)
    print_line(
        f"measured KL {choice.kl:.3g} on {choice.num_tokens} tokens that were held out, budget {choice.max_kl:g}; "
        f"graph and weights {choice.num_bytes / 1e6:.1f} MB; {len(choice.probes)} graphs measured"
    )


def _place(name: str) -> str:
    """Where in a block, or in the model, a matrix belongs."""
    return re.sub(r"^blocks\.\d+\.", "", name).removesuffix(".weight")


def _read_choice(data: dict[str, Any] | None) -> ChoiceRow | None:
    if data is None:
        return None
    groups = tuple(GroupRow(**{**row, "names": tuple(row["names"])}) for row in data["groups"])
    return ChoiceRow(**{**data, "groups": groups, "probes": tuple(data["probes"])})


def _read_json(path: Path) -> Any:  # noqa: ANN401 - JSON
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); export the bundle again") from error
