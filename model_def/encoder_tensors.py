"""Which tensors of a Hugging Face encoder's files are its parameters, which belong to heads, and what is missing.

In: the files' inventory, a family, the shapes that the config needs. Out: the checkpoint's name of each parameter, and
notes. It reads no weights.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from graphport.model_def.checkpoint_record import Shape, account_for_tensors, stored_name
from graphport.model_def.huggingface_encoders import EncoderFamily
from graphport.model_def.safetensors_files import WeightFiles, check_dtypes

# buffers that old versions of transformers saved
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")

# how checkpoints converted from TensorFlow call the parameters of a norm
_OLD_ENDINGS = {".weight": ".gamma", ".bias": ".beta"}


def find_encoder_tensors(
    where: str, family: EncoderFamily, files: WeightFiles, shapes: Mapping[str, Shape]
) -> tuple[dict[str, str], list[str]]:
    """The checkpoint's name of each of our parameters `shapes`, and notes on what was left out or converted.

    Raises CheckpointError for what is missing, extra or of the wrong shape.
    """
    has_prefix = any(name.startswith(family.prefix) for name in files.tensors)
    prefix = family.prefix if has_prefix else ""
    names = {name: _spelled(prefix + stored, files) for name, stored in _pairs(family, shapes)}
    needed = {stored: shapes[ours] for ours, stored in names.items()}
    left_out = [name for name in files.tensors if name not in needed and _is_left_out(name, prefix, family)]
    present = {name: tensor for name, tensor in files.tensors.items() if name not in left_out}
    account_for_tensors(where, found={name: tensor.shape for name, tensor in present.items()}, needed=needed)
    notes = check_dtypes(Path(where), present)
    heads = sorted(name for name in left_out if not name.endswith(_BUFFERS))
    return names, [*notes, f"left out, embeddings need no head: {', '.join(heads)}"] if heads else notes


def _pairs(family: EncoderFamily, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    for name in shapes:
        yield name, stored_name(name, outer=family.outer, blocks=family.blocks, modules=family.modules)


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
