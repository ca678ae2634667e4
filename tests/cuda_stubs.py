"""CUDA libraries without a GPU: enough symbols for ONNX Runtime's CUDA provider to create sessions, never to run them.

In: the installed provider library and gcc. Out: a folder of shared libraries to put on LD_LIBRARY_PATH, and what the
provider then says of a graph. Every function returns 0, memory is host memory, and the device claims compute
capability 9.0.
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

_PROVIDER = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
_NO_SYMBOLS = ("libcurand.so.10",)  # needed by name, though no symbol of it is

# What a machine has, from the environment of the process that loads the stubs: STUB_DEVICES (number), STUB_DRIVER
# (version, as 1000 * major + 10 * minor), STUB_MEMORY (bytes, of all devices), STUB_ERROR (what counting fails with).
_PRELUDE = """
#include <stdlib.h>
#include <string.h>
static unsigned long number(const char *name, unsigned long fallback) {
  const char *text = getenv(name);
  return text ? strtoul(text, 0, 10) : fallback;
}
static unsigned long held;
static __thread int current;
static int no_device(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (number("STUB_DRIVER", 13000) < 13000) return 35;
  if (number("STUB_ERROR", 0)) return number("STUB_ERROR", 0);
  return number("STUB_DEVICES", 1) == 0 || (visible && !*visible) ? 100 : 0;
}
"""
_BODIES = {
    "cudaMalloc": """int cudaMalloc(void **p, unsigned long n) {
  if (held + n > number("STUB_MEMORY", 80ul << 30)) return 2;
  unsigned long *block = malloc(n + 256);
  *block = n;
  __sync_fetch_and_add(&held, n);
  *p = (char *)block + 256;
  return 0;
}""",
    "cudaFree": """int cudaFree(void *p) {
  if (!p) return 0;
  unsigned long *block = (unsigned long *)((char *)p - 256);
  __sync_fetch_and_sub(&held, *block);
  free(block);
  return 0;
}""",
    "cudaMallocHost": "int cudaMallocHost(void **p, unsigned long n) { *p = malloc(n ? n : 1); return 0; }",
    "cudaHostAlloc": "int cudaHostAlloc(void **p, unsigned long n, unsigned f) { *p = malloc(n ? n : 1); return 0; }",
    "cudaFreeHost": "int cudaFreeHost(void *p) { free(p); return 0; }",
    "cudaMemcpy": "int cudaMemcpy(void *d, void *s, unsigned long n, int k) { memcpy(d, s, n); return 0; }",
    "cudaMemcpyAsync": "int cudaMemcpyAsync(void *d, void *s, unsigned long n) { memcpy(d, s, n); return 0; }",
    "cudaMemcpy2D": """typedef unsigned long size;
int cudaMemcpy2D(char *to, size to_pitch, char *from, size pitch, size width, size height) {
  for (size i = 0; i < height; i++) memcpy(to + i * to_pitch, from + i * pitch, width);
  return 0;
}""",
    "cudaGetDeviceCount": """int cudaGetDeviceCount(int *n) {
  int status = no_device();
  *n = status ? 0 : number("STUB_DEVICES", 1);
  return status;
}""",
    "cudaGetDevice": "int cudaGetDevice(int *n) { *n = current; return 0; }",
    "cudaSetDevice": """int cudaSetDevice(int n) {
  if (n < 0 || n >= number("STUB_DEVICES", 1)) return 101;
  current = n;
  return 0;
}""",
    "cudaDeviceGetAttribute": "int cudaDeviceGetAttribute(int *v, int a) { *v = a == 75 ? 9 : a != 76; return 0; }",
    "cudaGetDeviceProperties": "int cudaGetDeviceProperties(char *p) { memset(p, 0, 1024); return 0; }",
    "cudaMemGetInfo": """int cudaMemGetInfo(unsigned long *a, unsigned long *b) {
  *b = number("STUB_MEMORY", 80ul << 30);
  *a = *b - held;
  return 0;
}""",
    "cudaDriverGetVersion": 'int cudaDriverGetVersion(int *v) { *v = number("STUB_DRIVER", 13000); return 0; }',
    "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }",
    "cudaGetErrorString": """const char *cudaGetErrorString(int e) {
  return e == 2 ? "out of memory" : e == 100 ? "no CUDA-capable device is detected" : "stub";
}""",
    "cudaGetErrorName": 'char *cudaGetErrorName(int e) { return "stub"; }',
}

# One line of JSON [graph, provider options] in, one line out: the nodes of the session, or the error.
_PLACE = """
import collections, json, sys
import onnxruntime as ort

def place(graph, provider_options):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    provider = ("CUDAExecutionProvider", provider_options)
    session = ort.InferenceSession(graph, options, providers=[provider], enable_fallback=0)
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
    libraries["libcudart.so.13"] += _BODIES  # some are called by graphport alone
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
        """Where ONNX Runtime puts the nodes of `graph`.

        Raises AssertionError with the provider's message when it refuses the graph or the options.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(graph), provider_options]) + "\n")
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
    source, versions = folder / "stub.c", folder / "stub.map"
    functions = [_BODIES.get(name, f"long {name}(void) {{ return 0; }}") for name in sorted(set(names))]
    source.write_text("\n".join([_PRELUDE, *functions, ""]))
    versions.write_text(f"{soname} {{ global: *; }};\n")
    link = [f"-Wl,-soname,{soname}", f"-Wl,--version-script={versions}"]
    command = ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", "-o", str(folder / soname), str(source), *link]
    subprocess.run(command, check=True, capture_output=True)
