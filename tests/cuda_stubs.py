"""CUDA libraries without a GPU: enough symbols for ONNX Runtime's CUDA provider to create sessions and go through runs.

In: the installed provider library and gcc. Out: a folder of shared libraries to put on LD_LIBRARY_PATH, what the
provider then says of a graph, and which CUDA functions and kernels it calls, in order. Nothing is computed: kernels do
nothing, so every result is zero. The device claims compute capability 9.0.
"""

import collections
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import onnxruntime

from graphport.runtime.device import CUDA_DISABLED_OPTIMIZERS

_PROVIDER = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
_SOURCE = Path(__file__).with_suffix(".c")
_NO_SYMBOLS = ("libcurand.so.10",)  # needed by name, though no symbol of it is

# What graphport's runtime calls of the CUDA runtime besides the provider.
_OURS = (
    "cudaDriverGetVersion",
    "cudaFreeHost",
    "cudaGetDeviceCount",
    "cudaGetLastError",
    "cudaMallocHost",
    "cudaMemcpy2DAsync",
    "cudaMemGetInfo",
    "cudaStreamCreate",
    "cudaStreamDestroy",
)

# One line of JSON [graph, disabled optimisers, provider options] in, one line out: the session's nodes, or the error.
_PLACE = """
import collections, json, sys
import onnxruntime as ort

def place(graph, disabled, provider_options):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    provider = ("CUDAExecutionProvider", provider_options)
    session = ort.InferenceSession(
        graph, options, providers=[provider], enable_fallback=0, disabled_optimizers=disabled
    )
    assert session.get_providers()[0] == "CUDAExecutionProvider", session.get_providers()
    parts = session.get_provider_graph_assignment_info()
    return collections.Counter(f"{part.ep_name}:{node.op_type}" for part in parts for node in part.get_nodes())

for line in sys.stdin:
    try:
        answer = {"nodes": place(*json.loads(line))}
    except Exception as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""

# Real libraries in NVIDIA's wheels, where there are any, would be loaded before the stubs.
_STUBS_ALONE = """
import onnxruntime
onnxruntime.preload_dlls = lambda **_: None
"""


_PHASES = """
import os, sys

def phase(name):
    with open(os.environ["CUDA_STUB_LOG"], "a") as log:
        log.write(f"phase {name}\\n")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Number of nodes by op type on the CUDA and on the CPU provider, after ONNX Runtime's own optimiser."""

    cuda: dict[str, int]
    cpu: dict[str, int]


def why_not() -> str | None:
    """Why stubs cannot be built here, or None."""
    if not _PROVIDER.is_file():
        return "the installed onnxruntime has no CUDA provider (onnxruntime-gpu has)"
    missing = [tool for tool in ("gcc", "readelf") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not found" if missing else None


def build(folder: Path) -> Path:
    """Compile one library for each that the provider needs, with the undefined symbols it has of it."""
    listed = subprocess.run(["readelf", "--dyn-syms", "-W", str(_PROVIDER)], capture_output=True, text=True, check=True)
    libraries: dict[str, list[str]] = collections.defaultdict(list)
    for name, version in re.findall(r" UND (\w+)@(lib[\w.]+)", listed.stdout):
        libraries[version].append(name)
    libraries["libcuda.so.1"] = re.findall(r" UND (cu[A-Z]\w*)$", listed.stdout, re.MULTILINE)
    libraries["libcudart.so.13"] += _OURS
    for soname in (*libraries, *_NO_SYMBOLS):
        _compile(folder, soname, libraries.get(soname, []))
    return folder


class Placer:
    """Creates sessions on the stubbed CUDA provider, in one process of its own; a context manager."""

    def __init__(self, stubs: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PLACE],
            env={**os.environ, "LD_LIBRARY_PATH": str(stubs)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def place(self, graph: Path, **provider_options: str) -> Placement:
        """Where ONNX Runtime, with the runtime's choice of optimisers, puts the nodes of `graph`.

        Raises AssertionError with the provider's message when it refuses the graph or the options.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = [str(graph), list(CUDA_DISABLED_OPTIMIZERS), provider_options]
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process died"}')
        assert "error" not in answer, answer["error"]
        cuda, cpu = (
            {key.split(":")[1]: count for key, count in answer["nodes"].items() if key.startswith(provider)}
            for provider in ("CUDA", "CPU")
        )
        return Placement(cuda=cuda, cpu=cpu)

    def __enter__(self) -> "Placer":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def record(script: str, *arguments: str, stubs: Path, log: Path) -> dict[str, list[str]]:
    """Run Python code in a process of its own; returns the CUDA calls by the phase they were made in, in order.

    The code calls `phase(name)` where a phase begins, and prints nothing. Raises AssertionError when it fails.
    """
    log.write_text("")
    done = run_python(stubs, _PHASES + script, *arguments, CUDA_STUB_LOG=str(log))
    assert done.returncode == 0, done.stderr[-2000:]
    phases: dict[str, list[str]] = {"": []}
    for line in log.read_text().splitlines():
        if line.startswith("phase "):
            phases[line.removeprefix("phase ")] = []
        else:
            phases[list(phases)[-1]].append(line)
    return phases


def run_python(stubs: Path, code: str, *arguments: str, **machine: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process that finds the stubs first, and check nothing.

    `machine` are environment variables: CUDA_VISIBLE_DEVICES, and those that the stubs read.
    """
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [sys.executable, "-c", _STUBS_ALONE + code, *arguments],
        env={**environment, "LD_LIBRARY_PATH": str(stubs), **machine},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def _compile(folder: Path, soname: str, names: list[str]) -> None:
    """A library that exports `names`: as `cuda_stubs.c` has them, or returning 0."""
    written = set(re.findall(r"^\w[\w *]*?\b(\w+)\(", _SOURCE.read_text(), re.MULTILINE))
    source, versions = folder / "stub.c", folder / "stub.map"
    others = [f"long {name}(void) {{ return 0; }}" for name in sorted(set(names) - written)]
    source.write_text("\n".join([f'#include "{_SOURCE}"', *others, ""]))
    exported = "".join(f"{name}; " for name in sorted(set(names)))
    versions.write_text(f"{soname} {{ {'global: ' + exported if exported else ''}local: *; }};\n")
    link = [f"-Wl,-soname,{soname}", f"-Wl,--version-script={versions}"]
    command = ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", "-o", str(folder / soname), str(source), *link]
    subprocess.run(command, check=True, capture_output=True)
