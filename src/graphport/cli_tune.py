"""The command that measures how a bundle is fastest on this machine: `tune`.

In: arguments. Out: the file on stdout, or JSON; every trial on stderr. The runtime is imported when the command runs;
torch only with `--against`.
"""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from graphport import cli_tables
from graphport.cli_options import BundlePath, Debug, Json, missing_dependency

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphport.runtime.tuning_fusions import Fusions


def tune(
    bundle: BundlePath,
    *,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt of the request that is timed; 256 where the text has room.")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that it gets, one by one; 32 where the text has room.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Also export SOURCE without each fusion, and time that.")
    ] = None,
    drop_slow_fusions: Annotated[
        bool,
        typer.Option(
            "--drop-slow-fusions",
            help="Export BUNDLE again without fusions that cost time here, certified, in its place. Needs --against.",
        ),
    ] = False,
    max_seconds: Annotated[float, typer.Option(min=0.0, help="Begin no trial after so long.")] = 100.0,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Measure which graph, threads, prompt products and pieces are fastest here; `load` takes them from then on."""
    if drop_slow_fusions and against is None:
        raise typer.BadParameter("--drop-slow-fusions exports BUNDLE again: give its source with --against")
    from graphport.runtime import tune as run_tune
    from graphport.runtime.tuning_trial import write_tuning

    with cli_tables.progress_lines() as progress, tempfile.TemporaryDirectory(prefix="graphport-tune-") as place:
        found = run_tune(
            bundle,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            max_seconds=max_seconds,
            fusions=None if against is None else _fusions(bundle, against, Path(place), progress),
            drop_slow_fusions=drop_slow_fusions,
            progress=progress,
        )
        path = write_tuning(bundle, found)
    table = Table("tried", "before", "with it", "ratio", "noise", "")
    for trial in found.trials:
        times = ["" if value is None else f"{1e3 * value:.1f} ms" for value in (trial.best_seconds, trial.seconds)]
        ratios = ["" if value is None else f"{value:.3f}" for value in (trial.ratio, trial.noise)]
        table.add_row(escape(trial.what), *times, *ratios, escape(trial.verdict))
    cli_tables.print_table(table)
    cli_tables.print_line(f"timed: {found.request}; chosen: {found.choice.words()}")
    if found.dropped:
        cli_tables.print_line(f"{bundle} was exported again without {', '.join(found.dropped)}, and certified")
    print(json.dumps({"path": str(path), **found.to_dict()}) if as_json else path)


def _fusions(bundle: Path, against: str, place: Path, progress: "Callable[[str], None]") -> "Fusions":
    try:
        from graphport.export.fusion_variants import FusionVariants
    except ModuleNotFoundError as error:
        raise missing_dependency("tune --against", error) from error
    return FusionVariants(bundle, against, place, progress=progress)
