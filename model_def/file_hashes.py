"""SHA-256 of files, as manifests, certificates and sources record it.

In: a path. Out: hexadecimal digits. It judges nothing.
"""

import hashlib
from pathlib import Path


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
