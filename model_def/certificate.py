"""The certificate of a bundle: what was compared with what, on which inputs, within which tolerance; and its JSON.

In: evidence. Out: `Certificate`, its file's text, one line on what is wrong with a file that is none. It measures
nothing (see `played_runs.py`).
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from graphport.model_def.certified_inputs import Inputs, TextInputs, read_inputs
from graphport.model_def.compact_rows import CompactRows, Figure, RowErrors
from graphport.model_def.conditioning import CONDITIONED_FIGURES, Conditioning, FloatLoss
from graphport.model_def.signature import CERTIFICATE_FILE, MANIFEST_FILE, Kind, Manifest
from graphport.model_def.text_corpus import TextEvidence

CERTIFICATE_FORMAT = 5  # 4 did not see two tokens that changed places
MAX_BYTES = 8_000_000  # of a file that is read; one that `export` writes is below 2 MB

Against = Literal["original", "shipped"]
Where = Literal["anywhere", "same kernels"]

_OFFER = "make one with `graphport verify {folder} --against SOURCE --write`"


class CertificateError(ValueError):
    """A certificate that is missing, damaged, of another format, or for other bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the certificate; it passes when `measured` is at most `tolerance`. `inputs`: what it was made on."""

    name: str
    measured: float
    tolerance: float
    detail: str = ""
    inputs: str = ""

    @property
    def passed(self) -> bool:
        """Whether the measured value is a number within tolerance."""
        return bool(self.measured <= self.tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest error that a run may show against the original's rows, or against those of the bundle as exported.

    "same kernels": where provider, version of ONNX Runtime and kind of processor are those of the certificate.
    `output`: the one whose rows are meant, None for all. `conditioned`: rows of an ill-conditioned model are held to
    what float32 loses on them (see `conditioning.py`).
    """

    against: Against
    figure: Figure
    tolerance: float
    where: Where = "anywhere"
    output: str | None = None
    conditioned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What decides which kernels run: ONNX Runtime's provider and version, and the kind of processor."""

    provider: str
    onnxruntime: str
    processor: str

    def differences(self, candidate: Mapping[str, Any]) -> tuple[str, ...]:
        """In words, what is other here than where `candidate` was measured."""
        words = {"provider": "provider", "onnxruntime": "ONNX Runtime", "processor": "processor"}
        return tuple(
            f"{words[name]}: {candidate.get(name)} in the certificate, {here} here"
            for name, here in dataclasses.asdict(self).items()
            if candidate.get(name) != here
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Evidence that the files with these hashes compute the original model.

    `files`: SHA-256 (hex) by name. `reference`: the source, libraries and dtype of the original. `candidate`: what was
    compared with it, and on what (`Surroundings`). `inputs`: what the runs feed. `original`: by output, rows of eager
    PyTorch; `shipped`: by run, rows of the bundle itself as it was exported. `limits`: what `verify` holds the bundle
    to. `checks`: what was measured when the certificate was made. `errors`: by run, errors of its rows then. `layers`:
    by graph, errors of each place of the model at the export. `uncovered`: what no run reaches, in words.
    `conditioning`: what float32 itself loses, where a limit was missed without it.
    """

    files: Mapping[str, str]
    reference: Mapping[str, Any]
    candidate: Mapping[str, Any]
    inputs: Inputs
    original: Mapping[str, CompactRows]
    shipped: Mapping[str, CompactRows] = field(default_factory=dict)
    limits: tuple[Limit, ...]
    texts: TextEvidence | None
    checks: tuple[Check, ...]
    errors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    layers: Mapping[str, Any] = field(default_factory=dict)
    uncovered: tuple[str, ...] = ()
    conditioning: Conditioning | None = None

    def to_json(self) -> str:
        """The text of `certificate.json`."""
        plain = {
            "format": CERTIFICATE_FORMAT,
            "files": dict(self.files),
            "reference": dict(self.reference),
            "candidate": dict(self.candidate),
            "checks": [{**dataclasses.asdict(check), "passed": check.passed} for check in self.checks],
            "uncovered": list(self.uncovered),
            "conditioning": None if self.conditioning is None else self.conditioning.to_dict(),
            "limits": [dataclasses.asdict(limit) for limit in self.limits],
            "inputs": self.inputs.to_dict(),
            "texts": None if self.texts is None else self.texts.to_dict(),
            "errors": dict(self.errors),
            "layers": dict(self.layers),
            "original": {output: rows.to_dict() for output, rows in self.original.items()},
            "shipped": {run: rows.to_dict() for run, rows in self.shipped.items()},
        }
        return json.dumps(plain, ensure_ascii=False)


def loss_in(certificate: Certificate) -> Callable[[str], FloatLoss | None]:
    """What float32 loses on the rows of an output, as the certificate has it."""
    losses = {} if certificate.conditioning is None else certificate.conditioning.losses
    return losses.get


def text_of(certificate: Certificate) -> tuple[int, ...]:
    """The ids of a decoder's text."""
    assert isinstance(certificate.inputs, TextInputs)
    return certificate.inputs.ids


def certified_files(manifest: Manifest) -> dict[str, str]:
    """SHA-256 by name of the files that a certificate vouches for: all but itself and the manifest."""
    return {name: record.sha256 for name, record in manifest.files.items() if name != CERTIFICATE_FILE}


def read_certificate(folder: Path, manifest: Manifest) -> Certificate:
    """Read `folder/certificate.json`, for the files that `manifest` lists.

    Raises CertificateError, saying what to do, when there is none, when it is damaged or of another format, and when it
    vouches for other bytes.
    """
    path = folder / CERTIFICATE_FILE
    offer = _OFFER.format(folder=folder)
    if not path.is_file():
        raise CertificateError(f"{folder} has no {CERTIFICATE_FILE}, so nothing says what it should compute; {offer}")
    if path.stat().st_size > MAX_BYTES:
        raise CertificateError(f"{path} has {path.stat().st_size} bytes, more than any certificate; {offer}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        written = data["format"]
        if written != CERTIFICATE_FORMAT:
            is_newer = isinstance(written, int) and written > CERTIFICATE_FORMAT
            advice = "install a newer graphport, or " if is_newer else ""
            raise CertificateError(
                f"{path} has format {written}, this graphport reads {CERTIFICATE_FORMAT}; {advice}{offer}"
            )
        certificate = _certificate(data, manifest.kind)
    except CertificateError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CertificateError(f"{path} is damaged ({error!r:.120}); restore it, or {offer}") from error
    _require_same_files(path, certificate, manifest, offer)
    return certificate


def _require_same_files(path: Path, certificate: Certificate, manifest: Manifest, offer: str) -> None:
    listed = certified_files(manifest)
    names = sorted(listed.keys() | certificate.files.keys())
    other = [name for name in names if listed.get(name) != certificate.files.get(name)]
    if other:
        raise CertificateError(
            f"{path} is for other bytes than {MANIFEST_FILE} lists: {', '.join(other)}; it says nothing about this "
            f"bundle: {offer}"
        )
    problem = certificate.inputs.problem(manifest.config)
    outputs = {spec.name: spec.shape[-1] for spec in manifest.signature.outputs}
    widths = {output: rows.width for output, rows in certificate.original.items()}
    if problem is None and (not widths or any(outputs.get(output) != width for output, width in widths.items())):
        problem = "is for another vocabulary or other outputs"
    if problem is not None:
        raise CertificateError(f"{path} {problem}; {offer}")


def _certificate(data: dict[str, Any], kind: Kind) -> Certificate:
    original = {str(output): CompactRows.from_dict(rows) for output, rows in data["original"].items()}
    conditioning = None if data["conditioning"] is None else Conditioning.from_dict(data["conditioning"])
    losses = {} if conditioning is None else conditioning.losses
    for output, loss in losses.items():
        if len(loss.max_abs) != len(original[output].positions):
            raise ValueError(f"float32's loss is of other rows of {output} than eager PyTorch's")
    return Certificate(
        files={str(name): str(digest) for name, digest in data["files"].items()},
        reference=dict(data["reference"]),
        candidate=dict(data["candidate"]),
        inputs=read_inputs(kind, data["inputs"]),
        original=original,
        shipped={str(run): CompactRows.from_dict(rows) for run, rows in data["shipped"].items()},
        limits=tuple(_limit(limit) for limit in data["limits"]),
        texts=None if data["texts"] is None else TextEvidence.from_dict(data["texts"]),
        checks=tuple(_check(check) for check in data["checks"]),
        errors=dict(data["errors"]),
        layers=dict(data["layers"]),
        uncovered=tuple(map(str, data["uncovered"])),
        conditioning=conditioning,
    )


def _limit(data: dict[str, Any]) -> Limit:
    limit = Limit(**data)
    kinds = ((limit.against, Against), (limit.figure, Figure), (limit.where, Where))
    is_known = all(value in get_args(kind) for value, kind in kinds) and isinstance(limit.tolerance, float | int)
    if not is_known or (limit.conditioned and limit.figure not in CONDITIONED_FIGURES):
        raise ValueError(f"no limit of this version: {data}")
    return limit


def _check(data: dict[str, Any]) -> Check:
    check = Check(**{name: value for name, value in data.items() if name != "passed"})
    if not isinstance(check.name, str) or not isinstance(check.measured, float | int):
        raise TypeError(f"a check has a name and a number, got {data}")
    return check


def error_series(parts: Mapping[str, RowErrors]) -> dict[str, dict[str, Any]]:
    """Errors of each run's rows as JSON data, three digits each, to be drawn."""
    return {
        run: {
            "positions": [int(position) for position in errors.positions],
            **{
                name: [float(f"{value:.3g}") for value in getattr(errors, name)]
                for name in ("max_abs", "rms", "kl", "relative")
            },
        }
        for run, errors in parts.items()
    }
