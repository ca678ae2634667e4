"""What of the processor decides which kernels a CPU library chooses.

In: the machine. Out: one line. Two processors with the same line run the same code for the same graph.
"""

import platform
from pathlib import Path

# The features that ONNX Runtime's matrix kernels (MLAS) ask for when they choose their code.
_FEATURES = (
    *("sse4_1", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
    *("avx_vnni", "avx_vnni_int8", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimddp", "asimdhp", "i8mm", "bf16", "sve", "sme"),
)
_CPU_INFO = Path("/proc/cpuinfo")


def processor_kind(cpu_info: Path = _CPU_INFO) -> str:
    """Machine type and features, such as "x86_64 avx avx2 fma"; without Linux's list, what the system calls it."""
    if not cpu_info.is_file():
        return f"{platform.machine()} {platform.processor()}".strip()
    lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    listed = next((line for line in lines if line.split(":")[0].strip().lower() in ("flags", "features")), "")
    features = set(listed.partition(":")[2].split())
    return " ".join([platform.machine(), *(name for name in _FEATURES if name in features)])
