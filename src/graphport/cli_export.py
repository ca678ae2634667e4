"""The commands that make a bundle and show what it is: `export`, `report`.

In: arguments. Out: results on stdout, tables and progress on stderr. What exports is imported when a command runs, so
that it can say which optional dependency is missing; `report` needs none.
"""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graphport import cli_report, cli_tables
from graphport.cli_options import BundlePath, Debug, Json, missing_dependency
from graphport.cli_prepare import pack_after_export
from graphport.model_def.signature import BARE_GRAPH_FILE, TOKENIZER_FILE
from graphport.model_def.towers import IMAGES_FOLDER, TEXT_FOLDER, bundles_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphport.export.bundle import Bundle
    from graphport.model_def.signature import FileRecord

Target = Literal["cpu", "cuda"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "gguf", "auto"]
CacheType = Literal["auto", "fp32", "fp16", "bf16", "int8", "int4", "fp8"]


def export(
    source: Annotated[
        str, typer.Argument(help="Hugging Face folder or hub id, .gguf file, or path/to/file.py:function.")
    ],
    out: Annotated[Path, typer.Argument(help="Bundle folder to write; must not exist, unless --force.")],
    *,
    target: Annotated[Target, typer.Option(help="Where the bundle will run.")] = "cpu",
    precision: Annotated[
        Precision | None,
        typer.Option(help="Weights (default: gguf for a GGUF file with quantised blocks on cpu, else int8)."),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", help="Budget of precision auto: KL divergence to eager in nats (default 0.01)."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="UTF-8 text to calibrate int8, int4 and auto on (default: one that ships)."),
    ] = None,
    accuracy_level: Annotated[
        int | None, typer.Option(help="Activations of quantised matrices: 0 exact, 4 at 8 bits (cpu's default).")
    ] = None,
    kv_cache: Annotated[CacheType, typer.Option(help="Element type of the KV cache.")] = "auto",
    context: Annotated[int | None, typer.Option(min=1, help="Longest prompt + answer, in tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs used to verify.")] = 0,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Write no certificate.")] = False,
    require_fused: Annotated[
        list[str] | None, typer.Option(metavar="RULE=all|N", help="Fail unless RULE matched everywhere, or N times.")
    ] = None,
    require_exact: Annotated[
        bool, typer.Option("--require-exact", help="Fail if a matrix of the GGUF file would be encoded anew.")
    ] = False,
    disable_pass: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="Do without this fusion; may be repeated.")
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(metavar="genai|optimum", help="Also write a graph for this runtime; may be repeated."),
    ] = None,
    no_prepare: Annotated[
        bool, typer.Option("--no-prepare", help="Do not pack a GGUF file's blocks for this machine's processor.")
    ] = False,
    image_size: Annotated[
        str | None, typer.Option(metavar="HxW", help="Fix the size of images, as 224 or 224x336; default: any.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing OUT.")] = False,
    _debug: Debug = False,
) -> None:
    """Export SOURCE to the bundle OUT: fuse, lower, quantise, and compare with eager PyTorch."""
    required = _required_fusions(require_fused or [])
    try:
        from graphport.export import export as run_export
    except ModuleNotFoundError as error:
        raise missing_dependency("export", error) from error
    with cli_tables.progress_lines() as progress:
        bundle = run_export(
            source,
            out,
            target=target,
            precision=precision,
            kv_cache=kv_cache,
            context=context,
            image_size=_image_size(image_size),
            seed=seed,
            verify=not no_verify,
            accuracy_level=accuracy_level,
            calibration=calibration,
            max_kl=max_kl,
            require_fused=required,
            require_exact=require_exact,
            disable_passes=tuple(disable_pass or ()),
            layouts=tuple(layout or ()),
            force=force,
            progress=progress,
        )
    checks = [cli_tables.check_row(check) for check in bundle.certificate]
    cli_tables.print_bundle(_files_of(bundle), bundle.fusions, checks)
    cli_tables.print_notes(bundle.notes)
    if BARE_GRAPH_FILE in bundle.manifest.files and not no_prepare:
        pack_after_export(bundle.path)
    print(bundle.path)
    cli_tables.print_line(f"next: {_next_step(bundle)}")


def _next_step(bundle: "Bundle") -> str:
    """What a bundle of its kind is for."""
    texts, path = bundle.text_manifest or bundle.manifest, shlex.quote(str(bundle.path))
    if texts.kind == "image_encoder":
        return f"graphport report {path}, or load it in Python for its images"
    if TOKENIZER_FILE not in texts.files:
        return f"graphport report {path} (without a tokenizer it takes ids)"
    if texts.kind == "encoder":
        if texts.config.classifier is not None:
            return f"graphport report {path}, or load it in Python to classify texts"
        if texts.config.masked_head is not None:
            return f"graphport report {path}, or load it in Python to fill masks"
        return f'graphport embed {path} "A sentence to embed."'
    if texts.config.encoder is not None:
        hears = texts.config.encoder.audio is not None
        return f"graphport transcribe {path} recording.wav" if hears else f'graphport generate {path} "A text to read."'
    return f'graphport generate {path} "What is the capital of France?"'


def _files_of(bundle: "Bundle") -> "Mapping[str, FileRecord]":
    """Every file of a bundle, by its place in the folder."""
    if bundle.text_manifest is None:
        return bundle.manifest.files
    parts = {IMAGES_FOLDER: bundle.manifest, TEXT_FOLDER: bundle.text_manifest}
    return {f"{folder}/{name}": record for folder, part in parts.items() for name, record in part.files.items()}


def _image_size(text: str | None) -> tuple[int, int] | None:
    """Height and width in pixels, from "224" or "224x336"."""
    if text is None:
        return None
    edges = text.lower().split("x")
    if len(edges) > 2 or not all(edge.isascii() and edge.isdigit() for edge in edges):
        raise typer.BadParameter(f"--image-size {text!r} must be a number of pixels, or height x width as 224x336")
    return int(edges[0]), int(edges[-1])


def report(
    bundle: BundlePath,
    *,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the graph drawn.")] = None,
    times: Annotated[bool, typer.Option("--times", help="On the page, also how long each op takes here.")] = False,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Show what a bundle is: manifest, files, what fused, certificate."""
    if times and html is None:
        raise typer.BadParameter("--times needs --html FILE: the page shows them")
    folders = bundles_in(bundle)
    if html is not None and len(folders) > 1:
        choices = " or ".join(map(str, folders.values()))
        raise ValueError(f"--html draws one graph, and {bundle} holds two: give {choices}")
    parts = {name: cli_report.read_report(folder) for name, folder in folders.items()}
    if html is not None:
        cli_report.write_page(parts[""], html, with_times=times)
    if as_json:
        facts = {name: part.to_dict() for name, part in parts.items()}
        print(json.dumps(facts.get("", facts), ensure_ascii=False))
    elif html is None:
        for part in parts.values():
            cli_report.print_report(part)
    else:
        print(html)


def _required_fusions(values: list[str]) -> dict[str, int | Literal["all"]]:
    required: dict[str, int | Literal["all"]] = {}
    for value in values:
        rule, _, count = value.partition("=")
        if not rule or not (count == "all" or (count.isascii() and count.isdigit())):
            raise typer.BadParameter(f"--require-fused {value!r}: needs RULE=all or RULE=N, for example attention=30")
        if rule in required:
            raise typer.BadParameter(f"--require-fused names {rule} twice; give each rule once")
        required[rule] = "all" if count == "all" else int(count)
    return required
