"""Tables and progress of the command line, drawn by rich on stderr.

In: manifests, fusion counts, certificate checks. Out: text on stderr. It exports, verifies and runs nothing, and is
torch-free. What a bundle says about itself is read in `cli_report.py`.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from graphport.model_def.signature import FileRecord

if TYPE_CHECKING:
    from graphport.runtime.evaluate import Evaluation


class Check(Protocol):
    """One comparison of a certificate, as the exporter returns it."""

    @property
    def name(self) -> str: ...  # noqa: D102 - stands for itself
    @property
    def measured(self) -> float: ...  # noqa: D102
    @property
    def tolerance(self) -> float: ...  # noqa: D102
    @property
    def detail(self) -> str: ...  # noqa: D102
    @property
    def inputs(self) -> str: ...  # noqa: D102
    @property
    def passed(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One comparison: the figure measured, what it may be at most, the verdict; more figures, and inputs, in words."""

    name: str
    measured: float
    tolerance: float
    passed: bool
    detail: str
    inputs: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; a figure that is not finite is null."""
        return {**asdict(self), "measured": self.measured if math.isfinite(self.measured) else None}


def check_row(check: Check) -> CheckRow:
    """What is shown of a check that the exporter returned."""
    return CheckRow(
        name=check.name,
        measured=float(check.measured),
        tolerance=float(check.tolerance),
        passed=bool(check.passed),
        detail=check.detail,
        inputs=check.inputs,
    )


def print_bundle(listed: Mapping[str, FileRecord], fusions: Mapping[str, int], checks: Sequence[CheckRow]) -> None:
    """Files and sizes, what fused and how often, parity figures with their tolerances."""
    files = Table("file", "size", show_footer=True)
    files.columns[0].footer = "sum"
    files.columns[1].footer = _size(sum(record.size for record in listed.values()))
    files.columns[1].justify = "right"
    for name, record in listed.items():
        files.add_row(escape(name), _size(record.size))
    fused = Table("fused", "count")
    fused.columns[1].justify = "right"
    for rule, count in fusions.items():
        if count:
            fused.add_row(escape(rule), str(count))
    console = _console()
    for table in (files, fused):
        if table.row_count:
            console.print(table)
    print_checks(checks)


def print_checks(checks: Sequence[CheckRow]) -> None:
    """One row a comparison: what was measured, what is allowed; and a line for each that failed."""
    if not checks:
        return
    table = Table("parity", "measured", "tolerance", "")
    for row in checks:
        verdict = "[green]ok[/]" if row.passed else "[bold red]FAILED[/]"
        table.add_row(escape(row.name), f"{row.measured:.3g}", f"{row.tolerance:.3g}", verdict)
    _console().print(table)
    for row in checks:
        if not row.passed:
            print_line(f"FAILED {row.name}: {row.detail}")


def print_speeds(rows: Sequence[Mapping[str, Any]]) -> None:
    """One row a combination of prompt length and batch, on stdout: it is the result."""
    table = Table("prompt", "batch", "first token", "prefill tokens/s", "decode tokens/s")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(
            str(row["prompt_length"]),
            str(row["batch"]),
            f"{row['time_to_first_token_s']:.3f} s",
            f"{row['prefill_tokens_per_s']:.0f}",
            f"{row['decode_tokens_per_s']:.1f}",
        )
    Console().print(table)


class SiteError(Protocol):
    """The error of one site of a model in one step."""

    @property
    def step(self) -> int: ...  # noqa: D102 - stands for itself
    @property
    def site(self) -> str: ...  # noqa: D102
    @property
    def relative(self) -> float: ...  # noqa: D102
    @property
    def max_abs(self) -> float: ...  # noqa: D102


def print_growth(errors: Sequence[SiteError]) -> None:
    """One row a site, in the order of computation."""
    table = Table("step", "site", "relative error", "largest difference")
    for error in errors:
        table.add_row(str(error.step), escape(error.site), f"{error.relative:.3g}", f"{error.max_abs:.3g}")
    _console().print(table)


def print_evaluation(result: "Evaluation", *, name: str, against: str | None) -> None:
    """The figures of a text, those of the comparison if there is one, and the worst positions, on stdout."""
    figures = Table("", Column(escape(name), overflow="fold"))
    figures.add_row("perplexity", f"{result.perplexity:.4f}")
    figures.add_row("negative log likelihood", f"{result.negative_log_likelihood:.5f} nats a token")
    if result.bits_per_byte is not None:
        figures.add_row("bits per byte", f"{result.bits_per_byte:.4f}")
    fidelity = result.fidelity
    if fidelity is not None:
        figures.add_section()
        figures.add_row("against", escape(str(against)))
        for label, value in (
            ("its perplexity", f"{fidelity.perplexity:.4f}"),
            ("KL divergence, mean", f"{fidelity.kl_mean:.3g} nats"),
            ("KL median / p99 / max", f"{fidelity.kl_median:.3g} / {fidelity.kl_p99:.3g} / {fidelity.kl_max:.3g}"),
            ("top-1 agreement", f"{fidelity.top1_agreement:.2%}"),
            ("widest flip", f"{fidelity.widest_flip:.3g} logits"),
            ("probability difference, mean", f"{fidelity.probability_difference_mean:+.3%}"),
            ("probability difference, rms", f"{fidelity.probability_difference_rms:.3%}"),
            ("logit difference, max", f"{fidelity.max_abs_logit_difference:.3g}"),
        ):
            figures.add_row(label, value)
    Console().print(figures)
    _print_worst(result)


def _print_worst(result: "Evaluation") -> None:
    table = Table("worst token", "KL" if result.fidelity else "nats", "text")
    for place in result.worst:
        badness = place.negative_log_likelihood if place.kl is None else place.kl
        text = f"id {place.token_id}"
        if place.excerpt is not None:
            before, token, after = (repr(part)[1:-1] for part in asdict(place.excerpt).values())
            text = f"{escape(before)}[bold]«{escape(token)}»[/]{escape(after)}"
        table.add_row(str(place.index), f"{badness:.3g}", text)
    if table.row_count:
        Console().print(table)


def print_table(table: Table) -> None:
    """`table` on stderr."""
    _console().print(table)


def print_notes(notes: Iterable[str]) -> None:
    """One line a note."""
    for note in notes:
        print_line(f"note: {note}")


def print_line(text: str, *, end: str = "\n") -> None:
    """`text` as it is, on stderr, unwrapped (so that commands can be copied)."""
    _console().print(text, end=end, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_lines() -> Iterator[Callable[[str], None]]:
    """A function that says which stage begins: one line each with the seconds so far, and a spinner on a terminal."""
    console = _console()
    start = time.perf_counter()
    with console.status("") as status:

        def progress(stage: str) -> None:
            status.update(stage)
            elapsed = f"{time.perf_counter() - start:6.1f} s  "
            console.print(elapsed + stage, markup=False, highlight=False, soft_wrap=True)

        yield progress


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A function that says how much of a whole is done, shown as a bar on a terminal, which goes when it is done."""
    console = _console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress


def _console() -> Console:
    return Console(stderr=True)


def print_plan(row: Mapping[str, Any]) -> None:
    """Memory by part against what is free, on stdout: it is the result."""
    about = "about " if row["is_estimate"] else ""
    table = Table("memory", f"{row['device']}: {row['batch']} rows of {row['context']} tokens")
    table.columns[1].justify = "right"
    for name, num_bytes in row["bytes"].items():
        if num_bytes:
            table.add_row(f"cache ({row['kv_cache']})" if name == "cache" else name, _size(num_bytes))
    table.add_section()
    table.add_row("total", about + _size(row["total"]))
    if row["free"] is None:
        table.add_row("free", f"no {row['device']} device here")
    else:
        table.add_row("free", _size(row["free"]))
        table.add_row("fits", "yes" if row["fits"] else "no")
    if row["fits"] is False:
        table.add_row(f"tokens that fit with {row['batch']} rows", str(row["longest_context_that_fits"]))
        table.add_row(f"rows that fit with {row['context']} tokens", str(row["largest_batch_that_fits"]))
    Console().print(table)


def _size(num_bytes: int) -> str:
    if num_bytes < 1_000_000:
        return f"{num_bytes / 1e3:.1f} kB"
    return f"{num_bytes / 1e6:.1f} MB"
