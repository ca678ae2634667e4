"""What decides how ONNX Runtime's CPU kernels pack weights: the machine's instruction sets.

In: nothing. Out: a short text, equal on machines that pack alike. It measures nothing.
"""

import platform
from pathlib import Path

# Instruction sets that the kernels of ONNX Runtime 1.31 choose by (MLAS): of x86-64 and of ARM.
_PREFIXES = ("avx", "fma", "f16c", "amx", "asimd", "sve", "sme", "i8mm", "bf16")


def processor_kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Architecture and instruction sets, such as "x86_64 avx avx2 f16c fma".

    Raises OSError where the system does not tell (it is Linux that does).
    """
    flags: set[str] = set()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags |= {value for value in values.split() if value.startswith(_PREFIXES)}
    return " ".join([platform.machine(), *sorted(flags)])


def describe_processor() -> str:
    """`processor_kind`, or what the system calls the processor where it does not tell its instruction sets."""
    try:
        return processor_kind()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
