"""The command that writes down what a recording says: `transcribe`.

In: a bundle of a model that hears, a file. Out: text on stdout, timing on stderr. The runtime is imported when the
command runs; torch is never.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graphport import cli_tables
from graphport.cli_answers import answer, hears, search, timing_line
from graphport.cli_options import BundlePath, Debug, Json

if TYPE_CHECKING:
    from graphport.runtime.request_options import RequestArguments

Device = Literal["auto", "cpu", "cuda"]


def transcribe(
    bundle: BundlePath,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="WAV or FLAC file.")],
    *,
    language: Annotated[
        str | None, typer.Option(metavar="CODE", help="Language that is spoken (default: the likeliest).")
    ] = None,
    task: Annotated[str | None, typer.Option(help="transcribe, or translate to English.")] = None,
    timestamps: Annotated[
        bool | None,
        typer.Option("--timestamps/--no-timestamps", help="Mark times in the text (default: as the model says)."),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=0, help="Longest text, in tokens.")] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Beam search with N beams, above 1.")] = 1,
    device: Annotated[Device, typer.Option(help="Where to run.")] = "auto",
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Write down what FILE says: the text streams to stdout, its timing follows on stderr."""
    from graphport.runtime import SamplingParams, load_language_model

    lm = load_language_model(bundle, device=device, max_batch=num_beams)
    if not hears(lm):
        raise ValueError(f"{bundle} reads text, and hears nothing; use `graphport generate`")
    options: RequestArguments = {"language": language, "task": task, "timestamps": timestamps}
    sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, num_beams=num_beams)
    choose = answer if num_beams == 1 else search
    try:
        result = choose(lm, file, sampling, write=None if as_json else _write, options=options)
    except ModuleNotFoundError as error:  # its text says what to install
        raise RuntimeError(str(error)) from error
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    _write("\n")
    cli_tables.print_line(timing_line(result))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
