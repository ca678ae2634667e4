"""The command that runs a bundle's evidence again: `verify`.

In: arguments. Out: checks as a table on stderr or as JSON on stdout, a verdict on stdout. The runtime is imported when
the command runs; torch only with `--against`.
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graphport import cli_tables
from graphport.cli_options import BundlePath, Debug, Json, missing_dependency
from graphport.model_def.towers import bundles_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphport.model_def.certificate import Certificate, Check

Device = Literal["auto", "cpu", "cuda"]


def verify(
    bundle: BundlePath,
    *,
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Compare with eager PyTorch on SOURCE again.")
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="If all checks hold, make them the bundle's certificate.")
    ] = False,
    invariance: Annotated[
        bool, typer.Option("--invariance", help="Also check that answers do not depend on what surrounds a request.")
    ] = False,
    device: Annotated[Device, typer.Option(help="Where to run the bundle.")] = "auto",
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Re-run the bundle's certificate on this machine; exit status 1 when a check fails."""
    folders = bundles_in(bundle)
    if invariance:
        _require_invariant(folders)
    from graphport.runtime.verification import verify as run
    from graphport.runtime.verification import write_certificate

    results, rows, notes = {}, [], []
    with cli_tables.progress_lines() as progress:
        for name, folder in folders.items():
            fresh: Certificate | None = None
            again: tuple[Check, ...] = ()
            if against is not None:
                fresh, again = _fresh_certificate(folder, against, progress, replace=write)
            result = run(folder, certificate=fresh, references=again, device=device, keep_rows=write, progress=progress)
            results[folder] = result
            checks = result.checks
            if invariance and result.certificate is not None:
                checks += _check_invariance(folder, result.certificate, device, progress)
            before = f"{name}: " if name else ""
            rows += [cli_tables.check_row(dataclasses.replace(check, name=before + check.name)) for check in checks]
            notes += [before + note for note in result.notes]
    passed = all(result.passed for result in results.values()) and all(row.passed for row in rows)
    is_written = write and passed
    if is_written:
        for folder, result in results.items():
            write_certificate(folder, result)
    if as_json:
        facts = {"passed": passed, "written": is_written, "notes": notes}
        print(json.dumps({**facts, "checks": [row.to_dict() for row in rows]}, ensure_ascii=False))
    else:
        cli_tables.print_checks(rows)
        cli_tables.print_notes(notes)
        print("passed" if passed else "failed")
    if not passed:
        raise typer.Exit(1)


def _require_invariant(folders: "Mapping[str, Path]") -> None:
    """Raise BadParameter for a kind whose invariance is not checked, before anything runs."""
    from graphport.runtime.bundle_files import open_bundle

    for folder in folders.values():
        if open_bundle(folder).manifest.kind == "recurrent_decoder":
            raise typer.BadParameter(
                f"{folder} is a recurrent decoder, of which no invariance is checked; leave --invariance out"
            )


def _check_invariance(
    bundle: Path, certificate: "Certificate", device: Device, progress: "Callable[[str], None]"
) -> "tuple[Check, ...]":
    from graphport.model_def.certificate import text_of
    from graphport.model_def.certified_inputs import SourceInputs
    from graphport.runtime.bundle_files import open_bundle
    from graphport.runtime.encoder_invariance import check_encoder_invariance
    from graphport.runtime.invariance import check_invariance
    from graphport.runtime.source_invariance import check_source_invariance

    opened = open_bundle(bundle)
    if opened.manifest.kind == "decoder":
        return check_invariance(opened, text_of(certificate), device=device, observe=progress)
    if isinstance(certificate.inputs, SourceInputs):
        return check_source_invariance(opened, certificate.inputs, device=device, observe=progress)
    return check_encoder_invariance(opened, certificate.inputs, device=device, observe=progress)


def _fresh_certificate(
    bundle: Path, against: str, progress: "Callable[[str], None]", *, replace: bool
) -> "tuple[Certificate, tuple[Check, ...]]":
    try:
        from graphport.export.verify import fresh_certificate
    except ModuleNotFoundError as error:
        raise missing_dependency("verify --against", error) from error
    return fresh_certificate(bundle, against, replace=replace, progress=progress)
