"""Which tensors of a Hugging Face encoder's files are its parameters, which belong to heads, and what is missing.

In: the files' inventory, a family, the shapes that the config needs. Out: where each parameter is, and notes. It
reads no weights by itself.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from graphport.model_def.checkpoint_record import CheckpointError, Shape, account_for_tensors, stored_name
from graphport.model_def.huggingface_encoders import EncoderFamily
from graphport.model_def.huggingface_heads import MASKED_HEADS
from graphport.model_def.safetensors_files import WeightFiles, check_dtypes
from graphport.model_def.stored_parts import StoredPart, needed_shapes

# buffers that old versions of transformers saved
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")

# how checkpoints converted from TensorFlow call the parameters of a norm
_OLD_ENDINGS = {".weight": ".gamma", ".bias": ".beta"}


def find_encoder_tensors(
    where: str, family: EncoderFamily, files: WeightFiles, shapes: Mapping[str, Shape], head: Mapping[str, str]
) -> tuple[dict[str, StoredPart], list[str]]:
    """Where each of our parameters `shapes` is in the files, and notes on what was left out or converted.

    `head`: parameters of a head to the checkpoint's names of them.

    Raises CheckpointError for what is missing, extra or of the wrong shape.
    """
    has_prefix = any(name.startswith(family.prefix) for name in files.tensors)
    prefix = family.prefix if has_prefix else ""
    parts = {
        name: StoredPart(_spelled(head[name], files)) if name in head else _part(name, shape[0], prefix, family, files)
        for name, shape in shapes.items()
    }
    needed = needed_shapes(parts, shapes)
    left_out = [name for name in files.tensors if name not in needed and _is_left_out(name, prefix, family)]
    present = {name: tensor for name, tensor in files.tensors.items() if name not in left_out}
    account_for_tensors(where, found={name: tensor.shape for name, tensor in present.items()}, needed=needed)
    notes = check_dtypes(Path(where), present)
    heads = sorted(name for name in left_out if not name.endswith(_BUFFERS))
    return parts, [*notes, f"left out, of heads that are not used: {', '.join(heads)}"] if heads else notes


def check_tied(folder: Path, files: WeightFiles, family: EncoderFamily) -> None:
    """Raise CheckpointError where a masked head's matrix is stored and is not the embeddings'."""
    decoder = f"{MASKED_HEADS[family.model_type].decoder}.weight"
    prefix = family.prefix if any(name.startswith(family.prefix) for name in files.tensors) else ""
    embedding = prefix + family.outer["embedding.weight"]
    if decoder not in files.tensors or embedding not in files.tensors:
        return
    if not torch.equal(files.read(decoder), files.read(embedding)):
        raise CheckpointError(f"{folder}: {decoder} and {embedding} are different tensors; a masked head is tied")


def _part(name: str, num_rows: int, prefix: str, family: EncoderFamily, files: WeightFiles) -> StoredPart:
    stored = stored_name(name, outer=family.outer, blocks=family.blocks, modules=family.modules)
    module = ".".join(name.split(".")[2:-1])
    rows = None
    if module in family.fused:
        rows = torch.arange(num_rows) + family.fused[module] * num_rows
    return StoredPart(_spelled(prefix + stored, files), rows)


def _spelled(name: str, files: WeightFiles) -> str:
    """`name`, or its old spelling where the files have that."""
    for ending, old in _OLD_ENDINGS.items():
        before = name.removesuffix(ending) + old
        if name.endswith(ending) and name not in files.tensors and before in files.tensors:
            return before
    return name


def _is_left_out(name: str, prefix: str, family: EncoderFamily) -> bool:
    inner = name.removeprefix(prefix)
    return inner in _BUFFERS or inner.startswith(family.heads) or name.startswith(family.heads)
