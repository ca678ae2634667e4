"""How much memory may still be taken. In: nothing. Out: bytes. It takes none."""

from pathlib import Path

import psutil  # type: ignore[import-untyped]  # it ships no types


def free_memory() -> int:
    """Bytes this process may still take: of the machine, or of its cgroup if that is less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
    except OSError:  # no cgroup v2 limit to respect
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
