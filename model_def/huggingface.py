"""A Hugging Face folder (config.json, safetensors, tokenizer files) as a `Checkpoint`.

In: a folder. Out: configuration, float32 weights in our names, tokenizer, chat template, end ids.
It fetches nothing and runs no code of the folder; the config's keys stand in `huggingface_config.py`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphport.model_def.checkpoint_record import (
    Checkpoint,
    CheckpointError,
    read_json,
)
from graphport.model_def.config import HeadKind, TransformerConfig
from graphport.model_def.encoder_decoder_family import EncoderDecoderFamily, find_encoder_decoder_family
from graphport.model_def.encoder_decoder_tensors import StoredEncoderDecoder
from graphport.model_def.encoder_tensors import find_encoder_tensors, find_masked_output
from graphport.model_def.huggingface_config import find_decoder_family, read_config
from graphport.model_def.huggingface_encoder_decoders import read_encoder_decoder_config
from graphport.model_def.huggingface_encoders import EncoderFamily, find_encoder_family, read_encoder_config
from graphport.model_def.huggingface_forced_tokens import read_forced_tokens
from graphport.model_def.huggingface_heads import read_classifier, read_masked_head
from graphport.model_def.huggingface_speech import check_features
from graphport.model_def.huggingface_tokenizer import (
    read_chat_template,
    read_generation,
    read_mask_id,
    read_special_tokens,
    read_tokenizer_json,
)
from graphport.model_def.huggingface_vision import VisionFamily, find_vision_family, read_tower
from graphport.model_def.joined_models import refuse_adapter
from graphport.model_def.position_config import ConfigError
from graphport.model_def.safetensors_files import WeightFiles, find_weight_files
from graphport.model_def.sentence_transformers import MODULES_FILE, read_sentence_recipe
from graphport.model_def.stored_decoder import StoredDecoder
from graphport.model_def.text_towers import (
    SIMILARITY_TENSORS,
    find_text_tower,
    projection_names,
    read_similarity,
    read_text_tower,
)
from graphport.model_def.transformer import parameter_shapes
from graphport.model_def.vision_tensors import load_image_encoder

CONFIG_FILE = "config.json"
PREPROCESSOR_FILE = "preprocessor_config.json"


def load_folder(folder: Path, *, name: str | None = None) -> Checkpoint:
    """Read the checkpoint in `folder`; `name` (the folder's by default) goes into `source`.

    Everything that can be refused from config.json and the files' headers is refused before a weight is read.
    Raises CheckpointError.
    """
    refuse_adapter(folder)
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
        return _load_towers(folder, values, vision, name=name)
    pair = find_encoder_decoder_family(values.get("model_type"))
    if pair is not None:
        return _load_encoder_decoder(folder, values, pair, name=name)
    config, config_notes, stored = _read_decoder(folder, values)
    files = stored.files
    parts, tensor_notes = stored.find(str(folder), config)
    tokenizer_json, tokenizer_notes = read_tokenizer_json(folder)
    generation, generation_notes = read_generation(folder, values, tokenizer_json, vocab_size=config.vocab_size)
    return Checkpoint(
        config=config,
        weights={ours: part.read(files) for ours, part in parts.items()},
        generation=generation,
        tokenizer_json=tokenizer_json,
        chat_template=read_chat_template(folder),
        special_tokens=read_special_tokens(folder),
        source={"format": "huggingface", "name": name or folder.resolve().name, "sha256": files.sha256()},
        notes=(*config_notes, *files.notes, *tensor_notes, *generation_notes, *tokenizer_notes),
    )


def read_folder_config(folder: Path) -> TransformerConfig:
    """The configuration of the checkpoint in `folder`, without its weights. Raises CheckpointError."""
    refuse_adapter(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}; a Hugging Face folder needs it")
    values = read_json(folder / CONFIG_FILE)
    model_type = values.get("model_type")
    if find_encoder_decoder_family(model_type) is not None:
        raise CheckpointError(
            f"{folder} is an encoder-decoder, of which no configuration is read alone; export it first"
        )
    if find_encoder_family(model_type) is not None or find_vision_family(model_type) is not None:
        raise CheckpointError(f"{folder} is an encoder, of which no configuration is read alone; export it first")
    return _read_decoder(folder, values)[0]


def _read_decoder(folder: Path, values: Mapping[str, Any]) -> tuple[TransformerConfig, list[str], StoredDecoder]:
    """The configuration with its head decided, notes, and the files."""
    try:
        family = find_decoder_family(values)
        read_config(values, head="tied", family=family)  # refuses the config before the files are looked at
        stored = StoredDecoder.of(find_weight_files(folder), family.tensors)
        head, tie_notes = _decide_head(folder, values, stored)
        config, notes = read_config(values, head=head, family=family)
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    return config, [*notes, *tie_notes], stored


def _read_encoder_decoder(
    folder: Path, values: Mapping[str, Any], family: EncoderDecoderFamily
) -> tuple[TransformerConfig, list[str], StoredEncoderDecoder]:
    try:
        read_encoder_decoder_config(values, family, head="tied", has_head_bias=False)  # before the files are looked at
        stored = StoredEncoderDecoder(files=find_weight_files(folder), family=family)
        config, notes = read_encoder_decoder_config(
            values, family, head=stored.head_kind(values), has_head_bias=stored.has_head_bias
        )
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    return config, notes, stored


def _load_encoder_decoder(
    folder: Path, values: Mapping[str, Any], family: EncoderDecoderFamily, *, name: str | None
) -> Checkpoint:
    config, notes, stored = _read_encoder_decoder(folder, values, family)
    if config.encoder is not None and config.encoder.audio is not None:
        notes += check_features(read_json(folder / PREPROCESSOR_FILE), config.encoder)
    names, tensor_notes = stored.find(str(folder), config)
    tokenizer_json, tokenizer_notes = read_tokenizer_json(folder)
    generation, generation_notes = read_generation(folder, values, tokenizer_json, vocab_size=config.vocab_size)
    forced, forced_notes = read_forced_tokens(folder, values, tokenizer_json, family, vocab_size=config.vocab_size)
    return Checkpoint(
        config=config,
        weights=stored.read(names, config),
        generation=dataclasses.replace(generation, forced=forced),
        tokenizer_json=tokenizer_json,
        chat_template=None,
        special_tokens=read_special_tokens(folder),
        source={"format": "huggingface", "name": name or folder.resolve().name, "sha256": stored.files.sha256()},
        notes=(
            *notes,
            *stored.files.notes,
            *tensor_notes,
            *generation_notes,
            *forced_notes,
            *tokenizer_notes,
        ),
    )


def _load_towers(folder: Path, values: Mapping[str, Any], family: VisionFamily, *, name: str | None) -> Checkpoint:
    """The image tower, and the text tower where the folder has both."""
    files = find_weight_files(folder)
    has_text = family.text is not None and any(stored.startswith("text_model.") for stored in files.tensors)
    images = load_image_encoder(folder, values, family, files, name=name, has_text=has_text)
    tower = find_encoder_family(family.text)
    if not has_text or tower is None:
        return images
    own = {**read_tower(values, "text_config"), "model_type": tower.model_type}
    if "projection_dim" in family.keys:
        own["projection_dim"] = values.get("projection_dim", 512)
    others = ("vision_model.", "visual_projection.", *SIMILARITY_TENSORS)
    texts = {stored: tensor for stored, tensor in files.tensors.items() if not stored.startswith(others)}
    text = _load_encoder(folder, own, tower, files=dataclasses.replace(files, tensors=texts), name=name)
    return dataclasses.replace(images, text=text, similarity=read_similarity(folder, files))


def _load_encoder(
    folder: Path,
    values: Mapping[str, Any],
    family: EncoderFamily,
    *,
    files: WeightFiles | None = None,
    name: str | None,
) -> Checkpoint:
    files = files or find_weight_files(folder)
    tokenizer_json, tokenizer_notes = read_tokenizer_json(folder)
    tower = find_text_tower(family.model_type)
    recipe, head = None, {}
    try:
        if tower is None:
            config, notes = read_encoder_config(values, family)
        else:
            head = projection_names(tower, files)
            config, notes = read_text_tower(values, tower, has_projection=bool(head))
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    if tower is None:
        embeds = (folder / MODULES_FILE).is_file()
        classifier = None if embeds else read_classifier(values)
        masked = None if embeds else read_masked_head(values, config, read_mask_id(folder, tokenizer_json))
        if classifier is not None:
            config, head = dataclasses.replace(config, pooling=None, classifier=classifier[0]), classifier[1]
        elif masked is not None:
            config = dataclasses.replace(config, pooling=None, masked_head=masked[0])
            output, output_notes = find_masked_output(folder, files, family, is_tied=masked[0].tied)
            head, notes = {**masked[1], **output}, [*notes, *output_notes]
        else:
            recipe = read_sentence_recipe(folder, hidden_size=config.hidden_size)
            config = dataclasses.replace(config, pooling=recipe.pooling)
    shapes = parameter_shapes(config)
    parts, tensor_notes = find_encoder_tensors(str(folder), family, files, shapes, head)
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


def _decide_head(folder: Path, values: Mapping[str, Any], stored: StoredDecoder) -> tuple[HeadKind, list[str]]:
    """Tied or separate, from the flag and the tensors together."""
    flag = values.get("tie_word_embeddings")
    if flag is not None and not isinstance(flag, bool):
        raise CheckpointError(f"{folder / CONFIG_FILE}: tie_word_embeddings must be true or false, got {flag!r}")
    files, head, embedding = stored.files, stored.head_name, stored.embedding_name
    has_head, has_embedding = head in files.tensors, embedding in files.tensors
    if flag is None:
        kind: HeadKind = "separate" if has_head else "tied"
        return kind, [f"tie_word_embeddings is absent; the tensors make the head {kind}"]
    if not flag:
        if not has_head:
            raise CheckpointError(
                f"{folder}: tie_word_embeddings is false and {head} is missing; set the flag if the head is the "
                "embedding, or fetch the missing tensor"
            )
        return "separate", []
    if not has_head:
        return "tied", []
    if not has_embedding:
        return "tied", [f"{embedding} is not stored; the tied {head} was taken for it"]
    if files.tensors[head].shape != files.tensors[embedding].shape or not torch.equal(
        files.read(head), files.read(embedding)
    ):
        raise CheckpointError(
            f"{folder}: tie_word_embeddings is true, but {head} and {embedding} are different tensors; "
            "set the flag to false if the head was trained"
        )
    return "tied", [f"{head} equals {embedding}; kept once"]
