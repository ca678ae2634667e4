"""Files that appear whole or not at all: written beside, then renamed.

In: a path, and the text or a function that writes. Out: the file, in place of what was there. It creates no folders.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

OWN = 0o600  # for the user alone
SHARED = 0o644


def write_whole(path: Path, write: Callable[[IO[bytes]], object], *, mode: int = SHARED) -> None:
    """Let `write` fill a file beside `path`, which becomes `path` when all of it is on disk.

    What was at `path` stays if that fails (OSError, for instance when the disk is full).
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(mode)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            part.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, whole or not at all. Raises OSError."""
    write_whole(path, lambda file: file.write(text.encode()))
