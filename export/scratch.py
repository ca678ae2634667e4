"""Where graphs lie that live for seconds: in memory where there is plenty, else beside the bundle that is made.

In: a graph. Out: a folder that is gone afterwards. It writes no graph itself.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from graphport.model_def.free_memory import free_memory

_IN_MEMORY = Path("/dev/shm")  # tmpfs where there is one: half a gigabyte takes seconds on some disks
_ROOM = 4  # times the size of its tensors that a graph leaves free there, for the session that opens it


@contextlib.contextmanager
def scratch_folder(graph: ir.Model, *, beside: Path) -> Iterator[Path]:
    """An empty folder for `graph`, in memory or, as hidden, in the folder `beside`; removed with all that is in it."""
    values = (value.const_value for value in graph.graph.initializers.values())
    num_bytes = sum(value.nbytes for value in values if value is not None)
    with tempfile.TemporaryDirectory(dir=_place(num_bytes) or beside, prefix=".graphport.") as name:
        yield Path(name)


def _place(num_bytes: int) -> Path | None:
    if not _IN_MEMORY.is_dir():
        return None
    room = min(shutil.disk_usage(_IN_MEMORY).free, free_memory())
    return _IN_MEMORY if room >= _ROOM * num_bytes else None
