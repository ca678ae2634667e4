"""A GGUF file of an architecture that is read (see `gguf_config.py`) as a `Checkpoint`.

In: a .gguf file. Out: configuration, float32 weights in our names and row order, tokenizer, chat template, end ids.
The container is read by `gguf_file.py`, metadata becomes a configuration in `gguf_config.py`.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from graphport.model_def.block_config import AttentionConfig
from graphport.model_def.checkpoint_record import (
    Checkpoint,
    CheckpointError,
    as_float32,
    end_ids,
    first_id,
)
from graphport.model_def.config import TransformerConfig
from graphport.model_def.file_hashes import hash_file
from graphport.model_def.gguf_blocks import StoredMatrix
from graphport.model_def.gguf_config import find_architecture, read_gguf_config
from graphport.model_def.gguf_file import GgufFile, read_gguf_file
from graphport.model_def.gguf_tensors import GgufPart, HeadParts, find_parts
from graphport.model_def.gguf_tokenizer import chat_template, special_tokens, tokenizer_json
from graphport.model_def.position_config import ConfigError
from graphport.model_def.signature import GenerationDefaults
from graphport.model_def.transformer import parameter_shapes

_BEGIN_KEY, _PADDING_KEY = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.padding_token_id"
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def load_gguf(path: Path) -> Checkpoint:
    """Read a GGUF file; every refusal that the header allows comes before a weight is read.

    Raises CheckpointError.
    """
    file = read_gguf_file(path)
    try:
        config, notes = read_gguf_config(file)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
    parts = find_parts(file, config, find_architecture(file))
    generation = _generation(file, config.vocab_size, notes)
    tokenizer = tokenizer_json(file.metadata, where=str(path), vocab_size=config.vocab_size)
    if tokenizer is None:
        notes.append("the file has no vocabulary; text cannot be encoded")
    stored, weights = _read_weights(file, config, parts)
    return Checkpoint(
        config=config,
        weights=weights,
        generation=generation,
        tokenizer_json=tokenizer,
        chat_template=chat_template(file.metadata),
        special_tokens=special_tokens(file.metadata),
        source={"format": "gguf", "name": path.name, "sha256": hash_file(path)},
        notes=tuple(notes),
        stored=stored,
    )


def restored_rows(attention: AttentionConfig, num_heads: int) -> NDArray[np.int64]:
    """Row order int64 [num_heads * head_dim] that undoes the llama converter's interleaving of a q or k matrix.

    The converter turns a head's rotary halves (0..r/2, r/2..r) into pairs (0, r/2, 1, r/2 + 1, ...), see `permute` in
    llama.cpp's convert_hf_to_gguf.py. `restored = stored[rows]`; dimensions beyond the rotary ones keep their place.
    """
    # layers that do not rotate are reordered as well
    rotary_dim = attention.head_dim if attention.rotary is None else attention.rotary.rotary_dim(attention.head_dim)
    head = np.arange(attention.head_dim)
    head[:rotary_dim] = head[:rotary_dim].reshape(-1, 2).T.reshape(-1)
    return (np.arange(num_heads)[:, None] * attention.head_dim + head).reshape(-1)


def _read_weights(
    file: GgufFile, config: TransformerConfig, parts: Mapping[str, GgufPart | HeadParts]
) -> tuple[dict[str, StoredMatrix], dict[str, torch.Tensor]]:
    """The matrices as they are stored, and every tensor as float32, both in the order of our rows."""
    shapes = parameter_shapes(config)
    stored, weights = {}, {}
    decoded: dict[str, torch.Tensor] = {}
    for ours, part in parts.items():
        if isinstance(part, HeadParts):
            weights[ours] = part.read(file)  # blocks of keys run along their outputs and fit no matrix of rows
            floats = weights[ours].numpy().view(np.uint8)
            stored[ours] = StoredMatrix(kind=GGMLQuantizationType.F32, data=floats)
            continue
        rows = _rows(file, config, ours)
        if len(part.shape) == 2 and ours.endswith(".weight") and not ours.endswith("norm.weight"):
            stored[ours] = StoredMatrix(
                kind=file.tensors[part.name].kind, data=file.blocks(part.name)[part.rows], rows=rows
            )
        if part.name not in decoded:  # what several share follows at once
            whole = torch.from_numpy(file.read(part.name))
            decoded = {part.name: as_float32(f"{file.path.name}: {part.name}", whole)}
        weight = decoded[part.name][part.rows].reshape(shapes[ours])
        weights[ours] = weight if rows is None else weight[torch.from_numpy(rows)]
    return stored, weights


def _rows(file: GgufFile, config: TransformerConfig, ours: str) -> NDArray[np.int64] | None:
    """The file's rows in the order of our parameter; None where both are the same."""
    module = ours.rpartition(".")[0]
    if module.endswith(".attention.latent.query"):
        return _turning_first(config.blocks[int(ours.split(".")[1])].attention)
    if not find_architecture(file).is_permuted or not module.endswith((".attention.query", ".attention.key")):
        return None
    attention = config.blocks[int(ours.split(".")[1])].attention
    return restored_rows(attention, attention.num_heads if module.endswith("query") else attention.num_kv_heads)


def _turning_first(attention: AttentionConfig) -> NDArray[np.int64]:
    """The rows of queries whose heads have the dimensions that rotate last in the file."""
    assert attention.rotary is not None
    heads = np.arange(attention.num_heads * attention.head_dim).reshape(attention.num_heads, -1)
    return np.roll(heads, attention.rotary.rotary_dim(attention.head_dim), axis=1).reshape(-1)


def _generation(file: GgufFile, vocab_size: int, notes: list[str]) -> GenerationDefaults:
    candidates = [file.metadata.get(key) for key in _END_KEYS]
    return GenerationDefaults(
        eos_token_ids=end_ids(candidates, vocab_size=vocab_size, where=str(file.path)),
        bos_token_id=first_id("bos_token_id", [file.metadata.get(_BEGIN_KEY)], vocab_size, notes),
        pad_token_id=first_id("padding_token_id", [file.metadata.get(_PADDING_KEY)], vocab_size, notes),
    )
