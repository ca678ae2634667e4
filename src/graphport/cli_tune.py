"""The command that measures how a bundle is fastest on this machine: `tune`.

In: arguments. Out: the file on stdout, or JSON; every trial on stderr. The runtime is imported when the command runs;
torch is never.
"""

import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from graphport import cli_tables
from graphport.cli_options import BundlePath, Debug, Json


def tune(
    bundle: BundlePath,
    *,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt of the request that is timed.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that it gets, one by one.")] = 32,
    max_seconds: Annotated[float, typer.Option(min=0.0, help="Begin no trial after so long.")] = 100.0,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Measure which graph, threads and prompt pieces are fastest on this machine; `load` takes them from then on."""
    from graphport.runtime import tune as run_tune
    from graphport.runtime.tuning_trial import write_tuning

    with cli_tables.progress_lines() as progress:
        found = run_tune(
            bundle,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            max_seconds=max_seconds,
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
