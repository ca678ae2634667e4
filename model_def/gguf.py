"""A GGUF file of an architecture that is read (see `gguf_config.py`) as a `Checkpoint`.

In: a .gguf file. Out: configuration, float32 weights in our names and row order, tokenizer, chat template, end ids.
The container is read by `gguf_file.py`, metadata becomes a configuration in `gguf_config.py`.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from graphport.model_def.block_config import AttentionConfig
from graphport.model_def.checkpoint_record import (
    Checkpoint,
    CheckpointError,
    account_for_tensors,
    as_float32,
    end_ids,
    first_id,
    stored_name,
)
from graphport.model_def.config import TransformerConfig
from graphport.model_def.file_hashes import hash_file
from graphport.model_def.gguf_blocks import StoredMatrix
from graphport.model_def.gguf_config import IGNORED_TENSORS, find_architecture, read_gguf_config
from graphport.model_def.gguf_file import GgufFile, read_gguf_file
from graphport.model_def.gguf_rotary import ROPE_TENSORS
from graphport.model_def.gguf_tokenizer import chat_template, special_tokens, tokenizer_json
from graphport.model_def.position_config import ConfigError
from graphport.model_def.signature import GenerationDefaults
from graphport.model_def.transformer import parameter_shapes

# ours -> GGUF's, outside the blocks
_OUTER_NAMES = {
    "embedding.weight": "token_embd.weight",
    "final_norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
}

# ours -> GGUF's, within blocks.{i} and blk.{i}; both end in .weight or .bias
_BLOCK_NAMES = {
    "attention_norm": "attn_norm",
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "attention_output_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward_output_norm": "post_ffw_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.experts.gate": "ffn_gate_exps",
    "feed_forward.experts.up": "ffn_up_exps",
    "feed_forward.experts.down": "ffn_down_exps",
}

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
    names = {
        name: stored_name(name, outer=_OUTER_NAMES, blocks="blk", modules=_BLOCK_NAMES)
        for name in parameter_shapes(config)
    }
    _account(file, config, names)
    generation = _generation(file, config.vocab_size, notes)
    tokenizer = tokenizer_json(file.metadata, where=str(path), vocab_size=config.vocab_size)
    if tokenizer is None:
        notes.append("the file has no vocabulary; text cannot be encoded")
    stored, weights = _read_weights(file, config, names)
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


def _account(file: GgufFile, config: TransformerConfig, names: Mapping[str, str]) -> None:
    shapes = parameter_shapes(config)
    found = {
        name: tensor.shape
        for name, tensor in file.tensors.items()
        if name not in ROPE_TENSORS and not name.endswith(IGNORED_TENSORS)
    }
    account_for_tensors(str(file.path), found=found, needed={names[ours]: shape for ours, shape in shapes.items()})


def _read_weights(
    file: GgufFile, config: TransformerConfig, names: Mapping[str, str]
) -> tuple[dict[str, StoredMatrix], dict[str, torch.Tensor]]:
    """The matrices as they are stored, and every tensor as float32, both in the order of our rows."""
    stored, weights = {}, {}
    for ours, theirs in names.items():
        rows = _rows(file, config, ours)
        if len(file.tensors[theirs].shape) == 2:
            stored[ours] = StoredMatrix(kind=file.tensors[theirs].kind, data=file.blocks(theirs), rows=rows)
        weight = as_float32(f"{file.path.name}: {theirs}", torch.from_numpy(file.read(theirs)))
        weights[ours] = weight if rows is None else weight[torch.from_numpy(rows)]
    return stored, weights


def _rows(file: GgufFile, config: TransformerConfig, ours: str) -> NDArray[np.int64] | None:
    """The file's rows in the order of our parameter; None where both are the same."""
    module = ours.rpartition(".")[0]
    if not find_architecture(file).is_permuted or not module.endswith((".attention.query", ".attention.key")):
        return None
    attention = config.blocks[int(ours.split(".")[1])].attention
    return restored_rows(attention, attention.num_heads if module.endswith("query") else attention.num_kv_heads)


def _generation(file: GgufFile, vocab_size: int, notes: list[str]) -> GenerationDefaults:
    candidates = [file.metadata.get(key) for key in _END_KEYS]
    return GenerationDefaults(
        eos_token_ids=end_ids(candidates, vocab_size=vocab_size, where=str(file.path)),
        bos_token_id=first_id("bos_token_id", [file.metadata.get(_BEGIN_KEY)], vocab_size, notes),
        pad_token_id=first_id("padding_token_id", [file.metadata.get(_PADDING_KEY)], vocab_size, notes),
    )
