"""A checkpoint's configuration without its weights.

In: a Hugging Face folder or a GGUF file. Out: a `TransformerConfig`, and how many bytes a GGUF file's matrices take. Of
the weights only what decides whether the head is tied is read.
"""

from pathlib import Path

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.config import TransformerConfig
from graphport.model_def.gguf_blocks import FLOAT_TYPES
from graphport.model_def.gguf_config import read_gguf_config
from graphport.model_def.gguf_file import read_gguf_file
from graphport.model_def.huggingface import read_folder_config
from graphport.model_def.position_config import ConfigError


def read_checkpoint_config(path: Path) -> tuple[TransformerConfig, int | None]:
    """The configuration, and the bytes of a GGUF file's matrices (None where none of them is in blocks).

    Raises CheckpointError in one line that names the file and the fault.
    """
    if path.is_dir():
        return read_folder_config(path), None
    if path.suffix.lower() != ".gguf" or not path.is_file():
        raise CheckpointError(
            f"no model at {str(path)!r}; a plan needs a local Hugging Face folder with config.json, a .gguf file or "
            "path/to/file.py:function"
        )
    file = read_gguf_file(path)
    try:
        config, _ = read_gguf_config(file)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    matrices = [tensor for tensor in file.tensors.values() if len(tensor.shape) > 1]
    if all(tensor.kind in FLOAT_TYPES for tensor in matrices):
        return config, None
    return config, sum(tensor.num_bytes for tensor in matrices)
