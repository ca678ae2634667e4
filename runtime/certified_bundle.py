"""Whether a bundle is the one that its certificate is about, and whether it would run as it was certified.

In: a checked bundle, where it runs. Out: the certificate, or one line on why not. It runs no model (see
`verification.py`).
"""

from pathlib import Path

import onnxruntime

from graphport.model_def.certificate import Certificate, CertificateError, Surroundings, read_certificate
from graphport.model_def.file_hashes import hash_file
from graphport.model_def.processor import describe_processor
from graphport.model_def.signature import Manifest
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.device import Device

_PROVIDERS: dict[Device, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def changed_files(folder: Path, manifest: Manifest) -> list[str]:
    """Names of files that are missing or whose bytes are not those that the manifest lists."""
    return [
        name
        for name, record in manifest.files.items()
        if not (folder / name).is_file() or hash_file(folder / name) != record.sha256
    ]


def surroundings(device: Device) -> Surroundings:
    """What would run a session on `device` here."""
    return Surroundings(
        provider=_PROVIDERS[device], onnxruntime=onnxruntime.__version__, processor=describe_processor()
    )


def require_certified(bundle: BundleFiles) -> Certificate:
    """The bundle's certificate. Raises CertificateError for changed bytes, and where none vouches for the bundle."""
    changed = changed_files(bundle.folder, bundle.manifest)
    if changed:
        raise CertificateError(
            f"{bundle.folder}: strict=True, and {', '.join(changed)} changed since the export; export the bundle again"
        )
    certificate = read_certificate(bundle.folder, bundle.manifest)
    failed = [check.name for check in certificate.checks if not check.passed]
    if failed or not certificate.checks:
        what = f"failed: {', '.join(failed)}" if failed else "has no checks"
        raise CertificateError(f"{bundle.folder}: strict=True, and the certificate {what}; export the bundle again")
    return certificate


def require_same_surroundings(certificate: Certificate, folder: Path, device: Device) -> None:
    """Raise CertificateError unless the bundle runs on the provider and the ONNX Runtime that were certified."""
    here = surroundings(device)
    other = [words for words in here.differences(certificate.candidate) if not words.startswith("processor")]
    if other:
        raise CertificateError(
            f"{folder}: strict=True, and what runs is not what was certified ({'; '.join(other)}); use those, or "
            f"certify the bundle here with `graphport verify {folder} --write`"
        )
