"""What the commands of the command line share: options and arguments, and the error for a missing dependency.

In: nothing. Out: annotated types for Typer, an exception to raise. It runs no command; torch-free.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

_INSTALL_EXPORT = "pip install 'graphport[export]'"


@dataclass(slots=True)
class Invocation:
    """What one run of the command line has to remember when a command fails."""

    debug: bool = False


def _set_debug(context: typer.Context, value: bool) -> None:
    if value:
        context.find_root().obj.debug = True
        logging.getLogger("graphport").setLevel(logging.DEBUG)


Debug = Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Show tracebacks and debug messages.")]
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder that `graphport export` wrote.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
PrefillProducts = Annotated[
    Literal["as_exported", "float32"] | None,
    typer.Option(
        help="Products of prompts on the CPU: float32 takes a second session (default: what `tune` measured, else "
        "as_exported)."
    ),
]


def missing_dependency(command: str, error: ModuleNotFoundError) -> Exception:
    """The error to raise when `command` cannot import what it needs; ours is a bug and stays as it is."""
    if (error.name or "").split(".")[0] == "graphport":
        return error
    return RuntimeError(f"`graphport {command}` needs {error.name}, which is not installed; do: {_INSTALL_EXPORT}")
