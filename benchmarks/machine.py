"""What a table of results says about where it was measured: processor and commit."""

import os
import platform
import subprocess
from pathlib import Path

_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")


def describe_machine() -> str:
    """System, processor with the extensions that matter to kernels, cores."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    models = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")]
    words = set(text.split())
    features = ", ".join(name for name in _FEATURES if name in words)
    model = models[0] if models else "unknown processor"
    return f"{platform.system()} {platform.machine()}, {model} ({features}), {os.cpu_count()} cores"


def commit() -> str:
    """The checkout's commit, with "-dirty" where files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
