"""A decoder or encoder for other runtimes: their graph of it (`layouts.py`) and the settings that they read beside it.

In: a bundle folder with its graph, and what the model is. Out: files in the folder, the settings in the formats of
onnxruntime-genai (`genai_config.json`) and of transformers (`config.json`, `generation_config.json`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphport.export.bundle import write_json
from graphport.export.graph_pass import CompilePlan
from graphport.export.layouts import ATTENTION_MASK, GENAI, OPTIMUM, Layout, reads_texts, write_layout_graph
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import INPUT_IDS, LOGITS, GenerationDefaults

GENAI_CONFIG_FILE = "genai_config.json"
CONFIG_FILE, GENERATION_CONFIG_FILE = "config.json", "generation_config.json"

# optimum and transformers.js look up the sizes of caches by the names that a model_type has for them. Gemma's serve for
# every decoder, because the graph and not this file holds the model: it is one whose key/value heads and head size
# optimum 0.1 reads (Llama's head size it takes to be hidden_size / heads).
_DECODER_TYPE, _ENCODER_TYPE = "gemma", "bert"
# the tokenizer's own file says it all; the classes of a model_type would add the begin that theirs has
_TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast"}


def write_layouts(folder: Path, layouts: Sequence[Layout], plan: CompilePlan, generation: GenerationDefaults) -> None:
    """Write graph and settings of every layout beside the bundle's graph in `folder`."""
    for layout in layouts:
        write_layout_graph(folder, layout)
        if layout is GENAI:
            write_json(folder / GENAI_CONFIG_FILE, _genai_config(plan.config, generation, max_length=plan.max_length))
        if layout is OPTIMUM:
            sizes = _sizes(plan.config, max_length=plan.max_length)
            model_type = _ENCODER_TYPE if reads_texts(plan.config) else _DECODER_TYPE
            settings = {"model_type": model_type, **_TOKENIZER, **sizes, **_token_ids(generation)}
            write_json(folder / CONFIG_FILE, {**settings, **_labels(plan.config)})
            if not reads_texts(plan.config):
                write_json(folder / GENERATION_CONFIG_FILE, _token_ids(generation))


def _genai_config(config: TransformerConfig, generation: GenerationDefaults, *, max_length: int) -> dict[str, Any]:
    sizes = _sizes(config, max_length=max_length)
    return {
        "model": {
            "type": "decoder",
            **_required_ids(generation),
            "context_length": max_length,
            "vocab_size": config.vocab_size,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": GENAI.graph_file,
                "head_size": sizes["head_dim"],
                "hidden_size": config.hidden_size,
                "num_attention_heads": sizes["num_attention_heads"],
                "num_key_value_heads": sizes["num_key_value_heads"],
                "num_hidden_layers": config.num_layers,
                "inputs": {
                    "input_ids": INPUT_IDS,
                    "attention_mask": ATTENTION_MASK,
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": LOGITS,
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"do_sample": False, "max_length": max_length, "past_present_share_buffer": True},
    }


def _sizes(config: TransformerConfig, *, max_length: int) -> dict[str, Any]:
    attention = config.blocks[0].attention
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "max_position_embeddings": max_length,
    }


def _labels(config: TransformerConfig) -> dict[str, Any]:
    """What a classifier tells apart."""
    classifier = config.classifier
    if classifier is None:
        return {}
    kind = {"problem_type": "multi_label_classification"} if classifier.multi_label else {}
    return {
        **kind,
        "id2label": {str(number): label for number, label in enumerate(classifier.labels)},
        "label2id": {label: number for number, label in enumerate(classifier.labels)},
    }


def _token_ids(generation: GenerationDefaults) -> dict[str, Any]:
    """Ids of begin, end and padding, null where the checkpoint names none: left out, those of the model_type held."""
    return {
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": list(generation.eos_token_ids) or None,
        "pad_token_id": generation.pad_token_id,
    }


def _required_ids(generation: GenerationDefaults) -> dict[str, Any]:
    """The same where each must be a number: an end id stands in for padding, padding for the begin."""
    ends = list(generation.eos_token_ids) or [0]
    padding = ends[0] if generation.pad_token_id is None else generation.pad_token_id
    begin = padding if generation.bos_token_id is None else generation.bos_token_id
    return {"bos_token_id": begin, "eos_token_id": ends, "pad_token_id": padding}
