"""Size and SHA-256 of files, as manifests, certificates and sources record them.

In: a path. Out: hexadecimal digits, or a record. It judges nothing.
"""

import hashlib
from pathlib import Path

from graphport.model_def.signature import FileRecord


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def record_file(path: Path) -> FileRecord:
    """Size and SHA-256 of a file."""
    return FileRecord(size=path.stat().st_size, sha256=hash_file(path))
