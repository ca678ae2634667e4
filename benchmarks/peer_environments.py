"""An environment of its own for each peer, with exact versions, and the model in the peer's form.

In: the folder that holds them (build/peers), the source. Out: interpreters and model paths, made once and again when
the versions or the source changed. llama.cpp is compiled for this processor: a quarter of an hour on 2 cores.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from peer_process import HERE, PeerError

# One file that needs nothing beside it, without what it can do beyond serving; its page would be fetched.
_SERVER_ALONE = (
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def environment(name: str, folder: Path) -> Path:
    """Interpreter of a virtual environment with what `requirements_NAME.txt` pins, below `folder`. Raises PeerError."""
    wanted = (HERE / f"requirements_{name}.txt").read_text(encoding="utf-8")
    place = folder / name
    stamp, python = place / "installed.txt", place / "bin/python"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making {place} (log: {place}.log)", file=sys.stderr)
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    log = Path(f"{place}.log")
    log.unlink(missing_ok=True)
    _logged([sys.executable, "-m", "venv", place], log)
    _logged([python, "-m", "pip", "install", "--requirement", HERE / f"requirements_{name}.txt"], log)
    stamp.write_text(wanted, encoding="utf-8")
    return python


def llama_server(folder: Path) -> Path:
    """llama.cpp's server, of the version in `requirements_llama_cpp.txt`, built below `folder`. Raises PeerError."""
    python = environment("llama_server", folder)
    lines = (HERE / "requirements_llama_cpp.txt").read_text(encoding="utf-8").splitlines()
    wanted = next(line for line in lines if line.startswith("llama-cpp-python=="))
    place = python.parents[1]
    server, stamp, work = place / "llama-server", place / "built_from.txt", place / "work"
    if server.is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return server
    log = Path(f"{place}.log")
    print(f"building {server} (log: {log})", file=sys.stderr)
    shutil.rmtree(work, ignore_errors=True)
    archive = ("--no-deps", "--no-binary", "llama-cpp-python", "--dest", work)
    _logged([python, "-m", "pip", "download", *archive, wanted], log)
    _logged([python, "-m", "tarfile", "--extract", next(work.glob("*.tar.gz")), work], log)
    cmake, sources = python.with_name("cmake"), next(work.glob("*/vendor/llama.cpp"))
    tools = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={python.with_name('ninja')}", "-DCMAKE_BUILD_TYPE=Release")
    _logged([cmake, "-S", sources, "-B", work / "build", *tools, *_SERVER_ALONE], log)
    _logged([cmake, "--build", work / "build", "--target", "llama-server"], log)
    shutil.move(work / "build/bin/llama-server", server)
    stamp.write_text(wanted, encoding="utf-8")
    shutil.rmtree(work)
    return server


def genai_model(source: Path, python: Path, folder: Path) -> Path:
    """`source` as onnxruntime-genai's model builder makes it for a CPU in int4 with its defaults. Raises PeerError."""
    out = folder / f"{source.name}.genai-int4"
    stamp, identity = out / "made_from.json", json.dumps(_identity(source))
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == identity:
        return out
    log = Path(f"{out}.log")
    print(f"making {out} (log: {log})", file=sys.stderr)
    work = Path(f"{out}.part")
    log.unlink(missing_ok=True)
    for stale in (out, work):
        shutil.rmtree(stale, ignore_errors=True)
    work.mkdir(parents=True)
    checkpoint = source
    if source.is_file():
        checkpoint = work / "checkpoint"
        _logged([python, HERE / "huggingface_folder.py", source, checkpoint], log)
    builder = (python, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu")
    _logged([*builder, "-i", checkpoint, "-o", work / "model", "-c", work / "cache"], log)
    (work / "model").rename(out)
    stamp.write_text(identity, encoding="utf-8")
    shutil.rmtree(work)
    return out


def _identity(source: Path) -> list[list[str | int]]:
    """Names, sizes and times of the source's files."""
    files = [source] if source.is_file() else sorted(path for path in source.iterdir() if path.is_file())
    return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def _logged(command: Sequence[str | Path], log: Path) -> None:
    with log.open("ab") as file:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False)
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
        raise PeerError(
            f"`{' '.join(map(str, command))}` failed with status {done.returncode}: {lines[-1]} (see {log})"
        )
