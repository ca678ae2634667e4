"""A Hugging Face folder (config.json, safetensors, tokenizer files) as a `Checkpoint`.

In: a folder. Out: configuration, float32 weights in our names, tokenizer, chat template, end ids.
It fetches nothing and runs no code of the folder; the config's keys stand in `huggingface_config.py`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from graphport.model_def.checkpoint_record import (
    Checkpoint,
    CheckpointError,
    account_for_tensors,
    read_json,
    stored_name,
)
from graphport.model_def.config import HeadKind, TransformerConfig
from graphport.model_def.encoder_tensors import find_encoder_tensors
from graphport.model_def.huggingface_config import read_config
from graphport.model_def.huggingface_encoders import EncoderFamily, find_encoder_family, read_encoder_config
from graphport.model_def.huggingface_heads import read_classifier
from graphport.model_def.huggingface_tokenizer import (
    read_chat_template,
    read_generation,
    read_special_tokens,
    read_tokenizer_json,
)
from graphport.model_def.huggingface_vision import find_vision_family
from graphport.model_def.position_config import ConfigError
from graphport.model_def.safetensors_files import WeightFiles, check_dtypes, find_weight_files
from graphport.model_def.sentence_transformers import MODULES_FILE, read_sentence_recipe
from graphport.model_def.transformer import parameter_shapes
from graphport.model_def.vision_tensors import load_image_encoder

CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"

# ours -> the checkpoint's, outside the blocks
_OUTER_NAMES = {"embedding.weight": _EMBEDDING, "final_norm.weight": "model.norm.weight", "head.weight": _HEAD}

# ours -> the checkpoint's, within blocks.{i} and model.layers.{i}; both end in .weight or .bias
_BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}

# buffers that old versions of transformers saved; computed from the config here
_HARMLESS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "self_attn.masked_bias")


def load_folder(folder: Path, *, name: str | None = None) -> Checkpoint:
    """Read the checkpoint in `folder`; `name` (the folder's by default) goes into `source`.

    Everything that can be refused from config.json and the files' headers is refused before a weight is read.
    Raises CheckpointError.
    """
    if (folder / ADAPTER_FILE).is_file():
        raise CheckpointError(
            f"{folder} is an adapter ({ADAPTER_FILE}), not a model; merge it into its base first: "
            "AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(new_folder) of peft"
        )
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG_FILE}; a Hugging Face folder needs it, a GGUF file is given itself"
        )
    values = read_json(folder / CONFIG_FILE)
    family = find_encoder_family(values.get("model_type"))
    if family is not None:
        return _load_encoder(folder, values, family, name=name)
    vision = find_vision_family(values.get("model_type"))
    if vision is not None:
        return load_image_encoder(folder, values, vision, name=name)
    try:
        read_config(values, head="tied")  # refuses the config before the files are looked at
        files = find_weight_files(folder)
        head, tie_notes = _decide_head(folder, values, files)
        config, config_notes = read_config(values, head=head)
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    names = _stored_names(config, files)
    dtype_notes = _account(folder, config, names, files)
    tokenizer_json, tokenizer_notes = read_tokenizer_json(folder)
    generation, generation_notes = read_generation(folder, values, tokenizer_json, vocab_size=config.vocab_size)
    return Checkpoint(
        config=config,
        weights={ours: files.read(stored) for ours, stored in names.items()},
        generation=generation,
        tokenizer_json=tokenizer_json,
        chat_template=read_chat_template(folder),
        special_tokens=read_special_tokens(folder),
        source={"format": "huggingface", "name": name or folder.resolve().name, "sha256": files.sha256()},
        notes=(*config_notes, *tie_notes, *files.notes, *dtype_notes, *generation_notes, *tokenizer_notes),
    )


def read_folder_config(folder: Path) -> TransformerConfig:
    """The configuration of the checkpoint in `folder`, without its weights. Raises CheckpointError."""
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}; a Hugging Face folder needs it")
    values = read_json(folder / CONFIG_FILE)
    model_type = values.get("model_type")
    if find_encoder_family(model_type) is not None or find_vision_family(model_type) is not None:
        raise CheckpointError(f"{folder} is an encoder, of which no configuration is read alone; export it first")
    try:
        read_config(values, head="tied")  # refuses the config before the files are looked at
        head, _ = _decide_head(folder, values, find_weight_files(folder))
        return read_config(values, head=head)[0]
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error


def _load_encoder(folder: Path, values: Mapping[str, Any], family: EncoderFamily, *, name: str | None) -> Checkpoint:
    try:
        config, notes = read_encoder_config(values, family)
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    recipe, head = None, None if (folder / MODULES_FILE).is_file() else read_classifier(values)
    if head is None:
        recipe = read_sentence_recipe(folder, hidden_size=config.hidden_size)
        config = dataclasses.replace(config, pooling=recipe.pooling)
    else:
        config = dataclasses.replace(config, pooling=None, classifier=head[0])
    files = find_weight_files(folder)
    shapes = parameter_shapes(config)
    parts, tensor_notes = find_encoder_tensors(str(folder), family, files, shapes, {} if head is None else head[1])
    tokenizer_json, tokenizer_notes = read_tokenizer_json(folder)
    generation, generation_notes = read_generation(folder, values, tokenizer_json, vocab_size=config.vocab_size)
    return Checkpoint(
        config=config,
        weights={ours: part.read(files) for ours, part in parts.items()},
        generation=dataclasses.replace(generation, eos_token_ids=()),
        tokenizer_json=tokenizer_json,
        chat_template=None,
        special_tokens=read_special_tokens(folder),
        source={"format": "huggingface", "name": name or folder.resolve().name, "sha256": files.sha256()},
        notes=(
            *notes,
            *(recipe.notes if recipe else ()),
            *files.notes,
            *tensor_notes,
            *generation_notes,
            *tokenizer_notes,
        ),
        text_limit=recipe.text_limit if recipe else None,
    )


def _decide_head(folder: Path, values: Mapping[str, Any], files: WeightFiles) -> tuple[HeadKind, list[str]]:
    """Tied or separate, from the flag and the tensors together."""
    flag = values.get("tie_word_embeddings")
    if flag is not None and not isinstance(flag, bool):
        raise CheckpointError(f"{folder / CONFIG_FILE}: tie_word_embeddings must be true or false, got {flag!r}")
    has_head, has_embedding = _HEAD in files.tensors, _EMBEDDING in files.tensors
    if flag is None:
        kind: HeadKind = "separate" if has_head else "tied"
        return kind, [f"tie_word_embeddings is absent; the tensors make the head {kind}"]
    if not flag:
        if not has_head:
            raise CheckpointError(
                f"{folder}: tie_word_embeddings is false and {_HEAD} is missing; set the flag if the head is the "
                "embedding, or fetch the missing tensor"
            )
        return "separate", []
    if not has_head:
        return "tied", []
    if not has_embedding:
        return "tied", [f"{_EMBEDDING} is not stored; the tied {_HEAD} was taken for it"]
    if files.tensors[_HEAD].shape != files.tensors[_EMBEDDING].shape or not torch.equal(
        files.read(_HEAD), files.read(_EMBEDDING)
    ):
        raise CheckpointError(
            f"{folder}: tie_word_embeddings is true, but {_HEAD} and {_EMBEDDING} are different tensors; "
            "set the flag to false if the head was trained"
        )
    return "tied", [f"{_HEAD} equals {_EMBEDDING}; kept once"]


def _stored_names(config: TransformerConfig, files: WeightFiles) -> dict[str, str]:
    """Our parameter names to the checkpoint's."""
    names = {
        name: stored_name(name, outer=_OUTER_NAMES, blocks="model.layers", modules=_BLOCK_NAMES)
        for name in parameter_shapes(config)
    }
    if config.head == "tied" and _EMBEDDING not in files.tensors and _HEAD in files.tensors:
        names["embedding.weight"] = _HEAD
    return names


def _account(folder: Path, config: TransformerConfig, names: Mapping[str, str], files: WeightFiles) -> list[str]:
    """Refuse every difference between config and tensors; notes on what is ignored and converted."""
    shapes = parameter_shapes(config)
    needed = {stored: shapes[ours] for ours, stored in names.items()}
    harmless = sorted(name for name in files.tensors if name.endswith(_HARMLESS))
    ignorable = {*harmless, *_second_copy(config, names)}
    present = {name: tensor for name, tensor in files.tensors.items() if name not in ignorable}
    account_for_tensors(str(folder), found={name: tensor.shape for name, tensor in present.items()}, needed=needed)
    notes = check_dtypes(folder, present)
    return [*notes, f"ignored tensors: {', '.join(harmless)}"] if harmless else notes


def _second_copy(config: TransformerConfig, names: Mapping[str, str]) -> Iterable[str]:
    """The head that a tied checkpoint stores beside its embedding (compared already)."""
    return [_HEAD] if config.head == "tied" and names["embedding.weight"] == _EMBEDDING else []
