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
    from graphport.runtime.tuning_trial import Variant


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
    max_seconds: Annotated[float, typer.Option(min=0.0, help="Begin no trial after so long.")] = 100.0,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Measure which graph, threads and prompt pieces are fastest on this machine; `load` takes them from then on."""
    from graphport.runtime import tune as run_tune
    from graphport.runtime.tuning_trial import write_tuning

    with cli_tables.progress_lines() as progress, tempfile.TemporaryDirectory(prefix="graphport-tune-") as place:
        found = run_tune(
            bundle,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            max_seconds=max_seconds,
            variants=() if against is None else _variants(bundle, against, Path(place)),
            progress=progress,
        )
        path = write_tuning(bundle, found)
    table = Table("tried", "before", "with it", "noise", "")
    for trial in found.trials:
        times = (trial.best_seconds, trial.seconds, trial.noise)
        cells = ["" if value is None else f"{1e3 * value:.1f} ms" for value in times]
        table.add_row(escape(trial.what), *cells, escape(trial.verdict))
    cli_tables.print_table(table)
    cli_tables.print_line(f"timed: {found.request}; chosen: {found.choice.words()}")
    print(json.dumps({"path": str(path), **found.to_dict()}) if as_json else path)


def _variants(bundle: Path, against: str, place: Path) -> "tuple[Variant, ...]":
    try:
        from graphport.export.fusion_variants import fusion_variants
    except ModuleNotFoundError as error:
        raise missing_dependency("tune --against", error) from error
    return fusion_variants(bundle, against, place)
