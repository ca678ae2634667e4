"""Recorded CUDA calls (see `cuda_stubs.record`) in words.

In: lines of a recording. Out: names, bytes. It records nothing.
"""

UP, DOWN, ON_DEVICE = 1, 2, 3  # cudaMemcpyKind


def names(calls: list[str]) -> list[str]:
    """The calls, runs of kernel launches as one."""
    found: list[str] = []
    for call in calls:
        name = "kernels" if call.startswith("kernel ") else call.split(" ", maxsplit=1)[0]
        if not found or name != "kernels" or found[-1] != "kernels":
            found.append(name)
    return found


def copies(calls: list[str], kind: int) -> list[int]:
    """Bytes of each copy in one direction."""
    words = [call.split() for call in calls if call.startswith("cudaMemcpy")]
    return [int(size) for _, size, found, *_ in words if int(found) == kind]
