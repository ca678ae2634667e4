"""A model by its name: a Hugging Face folder, a GGUF file or a hub id in, one `Checkpoint` out.

It decides which reader a source needs and fetches hub ids; the formats stand in `huggingface.py` and `gguf.py`.
"""

import re
from pathlib import Path

from huggingface_hub import snapshot_download

from graphport.model_def.checkpoint_record import Checkpoint, CheckpointError
from graphport.model_def.gguf import load_gguf
from graphport.model_def.huggingface import load_folder

__all__ = ["Checkpoint", "CheckpointError", "load_checkpoint"]

_ACCEPTED = "a Hugging Face folder with config.json, a .gguf file, or a hub id like owner/name"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w-][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def load_checkpoint(source: str | Path) -> Checkpoint:
    """Read a model's configuration, float32 weights, tokenizer and generation defaults.

    `source` is a folder with config.json and safetensors, a `.gguf` file, or a hub id. Pickled weights are never
    loaded and no code of a repository is run. Raises CheckpointError with one line that names the file and the fault.
    """
    path = Path(source)
    if path.is_dir():
        return load_folder(path)
    if path.is_file():
        return _load_file(path)
    if isinstance(source, str) and _HUB_ID.fullmatch(source) and not source.endswith(".gguf"):
        return load_folder(_fetch(source), name=source)
    raise CheckpointError(f"no model at {str(source)!r}: nothing is there, and it is no hub id; needed is {_ACCEPTED}")


def _load_file(path: Path) -> Checkpoint:
    if path.suffix.lower() == ".gguf":
        return load_gguf(path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} holds weights only; give the folder that also has config.json: {path.parent}")
    raise CheckpointError(f"{path} is a file that is not read ({path.suffix or 'no ending'}); needed is {_ACCEPTED}")


def _fetch(hub_id: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"no folder is named {hub_id!r}, and as a hub id it could not be fetched: {reason[0]}; "
            "check the name and the network, or give a local folder"
        ) from error
