"""The command that says where two forms of a model part: `diff`.

In: two names. Out: the first step, layer and op above tolerance, and how the error grew. What exports is imported when
the command runs.
"""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from graphport import cli_tables
from graphport.cli_options import Debug, Json, missing_dependency

if TYPE_CHECKING:
    from graphport.export.first_divergence import Divergence

_NAME = "A bundle, BUNDLE@cuda, or SOURCE, exported:SOURCE, compiled:SOURCE."


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help=_NAME)],
    second: Annotated[str, typer.Argument(metavar="B", help=_NAME)],
    *,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of text.")] = 48,
    steps: Annotated[int, typer.Option(min=0, help="How many of them are decoded one by one.")] = 8,
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Largest relative error (default: by the precisions of A and B).")
    ] = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Find the first decode step, layer and op where A and B differ; exit status 1 when they do."""
    try:
        from graphport.export.model_diff import diff_models
    except ModuleNotFoundError as error:
        raise missing_dependency("diff", error) from error
    with cli_tables.progress_lines() as progress:
        found = diff_models(first, second, num_tokens=tokens, num_steps=steps, tolerance=tolerance, progress=progress)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        cli_tables.print_growth(found.growth())
        print(_verdict(found))
    if found.first is not None:
        raise typer.Exit(1)


def _verdict(found: "Divergence") -> str:
    error = found.first
    if error is None:
        worst = max(found.errors, key=lambda one: one.relative)
        return f"no error above {found.tolerance:g}; largest {worst.relative:.3g}: {worst.site}, step {worst.step}"
    what = "the prompt" if error.step == 0 else f"decode step {error.step}"
    size = f"{error.relative:.3g} > {found.tolerance:g}"
    return f"{found.second_model} leaves {found.first_model} at {error.site}, {what}: {size}"
