"""The command that turns texts into vectors: `embed`.

In: a bundle, texts as arguments or one a line. Out: vectors as JSON on stdout, timing on stderr. The runtime is
imported when the command runs; torch is never.
"""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from graphport import cli_tables
from graphport.cli_options import BundlePath, Debug, Json
from graphport.model_def.text_file import read_text
from graphport.model_def.towers import TEXT_FOLDER, bundles_in

Device = Literal["auto", "cpu", "cuda"]


def embed(
    bundle: BundlePath,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT...", help="Texts; lines of stdin without any.")
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="UTF-8 texts, one a line; '-' is stdin.")
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="Scale vectors to length 1 (default: the model's recipe)."),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are too long, and say how many.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts that run together.")] = 32,
    device: Annotated[Device, typer.Option(help="Where to run.")] = "auto",
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Print one vector a text, a line each, as a JSON list."""
    if texts and file is not None:
        raise typer.BadParameter("give texts or --file, not both")
    lines = list(texts) if texts else _read_lines(file)
    from graphport.runtime import load_encoder

    folders = bundles_in(bundle)
    encoder = load_encoder(folders.get(TEXT_FOLDER, bundle), device=device, max_batch=batch_size)
    begin = time.perf_counter()
    vectors = encoder.encode(lines, normalize=normalize, truncate=truncate).tolist()
    seconds = time.perf_counter() - begin
    if as_json:
        print(json.dumps({"bundle": str(bundle), "dimension": encoder.dimension, "embeddings": vectors}))
    else:
        for vector in vectors:
            print(json.dumps(vector))
    cli_tables.print_line(f"{len(vectors)} texts, {encoder.dimension} dimensions, {seconds:.3f} s")


def _read_lines(file: Path | None) -> list[str]:
    """The lines of a file or of stdin, without the ends of lines; raises ValueError for what is no UTF-8.

    Lines end with LF or CR LF alone: `str.splitlines` would cut a text at U+2028, form feeds and others too.
    """
    text = sys.stdin.read() if file is None or str(file) == "-" else read_text(file, argument="--file")
    lines = text.split("\n")
    if not lines[-1]:  # after the end of the last line
        lines.pop()
    return [line.removesuffix("\r") for line in lines]
