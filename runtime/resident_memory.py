"""Memory that a process keeps and no longer needs, given back to the system.

In: nothing, or a file that ONNX Runtime has mapped. Out: fewer resident pages; no value changes. It frees no object:
only what was freed already, and mapped pages that were read, never written, and can be read from the file again.
"""

import ctypes
import ctypes.util
import re
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = 4  # madvise(2): unmap; a private page that was written would be lost, a clean one is read again
_MAPS = Path("/proc/self/smaps")
_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ *(.*)")  # most have no path


def return_freed() -> None:
    """Give freed heap pages back to the system, which glibc does only at the end of the heap (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # other C libraries have none
        trim(ctypes.c_size_t(0))


def forget_mapped(path: Path) -> int:
    """Unmap the pages of `path` that this process has read; returns the bytes that were resident. Linux alone.

    Opening a graph reads all weights once to pack them; what lies packed in the file is read from then on.
    """
    if not _MAPS.exists():
        return 0
    ranges = list(_clean_ranges(path.resolve()))
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for begin, end, _ in ranges:
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)
    return sum(resident for _, _, resident in ranges)


def _clean_ranges(path: Path) -> Iterator[tuple[int, int, int]]:
    """(begin, end, resident bytes) of the mappings of `path` without a page of their own."""
    begin, end, is_ours, resident = 0, 0, False, 0
    for line in _MAPS.read_text().splitlines():
        if found := _RANGE.fullmatch(line):
            begin, end, is_ours = int(found[1], 16), int(found[2], 16), found[3] == str(path)
        elif line.startswith("Rss:"):
            resident = int(line.split()[1]) * 1024
        elif line.startswith("Anonymous:") and is_ours and line.split()[1] == "0":
            yield begin, end, resident
