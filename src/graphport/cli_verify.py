"""The command that runs a bundle's evidence again: `verify`.

In: arguments. Out: checks as a table on stderr or as JSON on stdout, a verdict on stdout. The runtime is imported when
the command runs; torch only with `--against`.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graphport import cli_tables
from graphport.cli_options import BundlePath, Debug, Json, missing_dependency
from graphport.model_def.signature import read_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

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
    if read_manifest(bundle).kind != "decoder":  # encoders, images, encoder-decoders
        given = {"--write": write, "--invariance": invariance, "--device": device != "auto"}
        _verify_encoder(bundle, against, given=given, as_json=as_json)
        return
    from graphport.runtime.bundle_files import open_bundle
    from graphport.runtime.invariance import check_invariance
    from graphport.runtime.verification import verify as run
    from graphport.runtime.verification import write_certificate

    with cli_tables.progress_lines() as progress:
        fresh, references = (None, ()) if against is None else _fresh_certificate(bundle, against, progress)
        result = run(
            bundle, certificate=fresh, references=references, device=device, keep_rows=write, progress=progress
        )
        checks = result.checks
        if invariance and result.certificate is not None:
            checks += check_invariance(open_bundle(bundle), result.certificate.ids, device=device, observe=progress)
    rows = [cli_tables.check_row(check) for check in checks]
    passed = result.passed and all(row.passed for row in rows)
    is_written = write and passed
    if is_written:
        write_certificate(bundle, result)
    if as_json:
        facts = {"passed": passed, "written": is_written, "notes": result.notes}
        print(json.dumps({**facts, "checks": [row.to_dict() for row in rows]}, ensure_ascii=False))
    else:
        cli_tables.print_checks(rows)
        cli_tables.print_notes(result.notes)
        print("passed" if passed else "failed")
    if not passed:
        raise typer.Exit(1)


def _verify_encoder(bundle: Path, against: str | None, *, given: dict[str, bool], as_json: bool) -> None:
    """An encoder has no compact certificate yet: its graph is run again on padded batches, by the exporter."""
    for option, is_given in given.items():
        if is_given:
            raise typer.BadParameter(f"{option} is for decoders, and {bundle} is an encoder")
    try:
        from graphport.export.verify_encoder import verify_encoder
    except ModuleNotFoundError as error:
        raise missing_dependency("verify", error) from error
    with cli_tables.progress_lines() as progress:
        rows = [cli_tables.check_row(check) for check in verify_encoder(bundle, against=against, progress=progress)]
    passed = bool(rows) and all(row.passed for row in rows)
    if as_json:
        print(json.dumps({"passed": passed, "checks": [row.to_dict() for row in rows]}, ensure_ascii=False))
    else:
        cli_tables.print_checks(rows)
        print("passed" if passed else "failed")
    if not passed:
        raise typer.Exit(1)


def _fresh_certificate(
    bundle: Path, against: str, progress: "Callable[[str], None]"
) -> "tuple[Certificate, tuple[Check, ...]]":
    try:
        from graphport.export.verify import fresh_certificate
    except ModuleNotFoundError as error:
        raise missing_dependency("verify --against", error) from error
    return fresh_certificate(bundle, against, progress=progress)
