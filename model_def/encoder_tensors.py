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


def find_masked_output(
    folder: Path, files: WeightFiles, family: EncoderFamily, *, is_tied: bool
) -> tuple[dict[str, str], list[str]]:
    """The stored names of a masked head's matrix, where it is not the embeddings', and of its bias, and notes.

    Raises CheckpointError where the tensors contradict `is_tied`.
    """
    head = MASKED_HEADS[family.model_type]
    weight, bias, own_bias = f"{head.decoder}.weight", f"{head.output}.bias", f"{head.decoder}.bias"
    has_own = own_bias in files.tensors
    if is_tied:
        prefix = family.prefix if any(name.startswith(family.prefix) for name in files.tensors) else ""
        for apart, shared in ((weight, prefix + family.outer["embedding.weight"]), (own_bias, bias)):
            _check_equal(folder, files, apart, shared)
        return {"masked_head.bias": own_bias if has_own and bias not in files.tensors else bias}, []
    if weight not in files.tensors:
        raise CheckpointError(
            f"{folder}: tie_word_embeddings is false and {weight} is missing; set the flag to true if the head's "
            "matrix is the embeddings', or fetch the missing tensor"
        )
    notes = []
    if not has_own and bias in files.tensors:
        notes = [f"{own_bias} is not stored; {bias}, which transformers before 5 shared with it, was taken for it"]
    return {"masked_head.weight": weight, "masked_head.bias": bias if notes else own_bias}, notes


def _check_equal(folder: Path, files: WeightFiles, apart: str, shared: str) -> None:
    """Raise CheckpointError where both are stored and differ."""
    if not {apart, shared} <= files.tensors.keys() or apart == shared:
        return
    if files.tensors[apart].shape != files.tensors[shared].shape or not torch.equal(
        files.read(apart), files.read(shared)
    ):
        raise CheckpointError(
            f"{folder}: {apart} and {shared} are different tensors, but tie_word_embeddings is true; set it to false "
            "in config.json if the head was trained apart"
        )


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
