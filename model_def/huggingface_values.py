"""Values of a config.json: read with their type checked, ignored, or refused by name.

In: parsed JSON and a key. Out: a value, or CheckpointError in one line. It knows no model type (see
`huggingface_config.py`, `huggingface_encoders.py`).
"""

from collections.abc import Collection, Mapping
from typing import Any

from graphport.model_def.block_config import Activation
from graphport.model_def.checkpoint_record import MOST_COUNT, CheckpointError

Values = Mapping[str, Any]  # parsed JSON

# accepted at the values that switch them off, in every family that does not read them
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "pretraining_tp": (None, 1),
    "quantization_config": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "auto_map": (None,),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "rope_interleaved": (None, False),
    "per_layer_config": (None,),
    "pruned_heads": (None, {}),
    "chunk_size_feed_forward": (None, 0),
    "layer_types": (None,),
}

# keys that do not change what the model computes
_IGNORED_KEYS = frozenset(
    (
        *("architectures", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "classifier_dropout", "name_or_path"),
        *("_name_or_path", "_attn_implementation", "attn_implementation", "return_dict", "output_hidden_states"),
        *("output_attentions", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task"),
        *("task_specific_params", "torchscript", "is_decoder", "unk_token_id", "sep_token_id", "cls_token_id"),
        *("mask_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "tokenizer_class"),
        *("prefix", "max_length", "min_length", "do_sample", "num_beams", "temperature", "top_k", "top_p", "typical_p"),
        *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "num_return_sequences", "early_stopping"),
        *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "remove_invalid_values", "diversity_penalty"),
        *("encoder_no_repeat_ngram_size", "num_beam_groups", "exponential_decay_length_penalty"),
        *("return_dict_in_generate", "output_scores", "tf_legacy_loss", "use_bfloat16", "transformers.js_config"),
        *("is_llama_config", "unsloth_fixed", "unsloth_version", "_commit_hash", "tie_encoder_decoder"),
        *("cross_attention_hidden_size", "tie_last_hidden_states"),
    )
)

# layers and experts, of which each has a record before any weight is looked for: at most MOST_COUNT
_COUNT_KEYS = frozenset(
    (
        *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "encoder_layers", "decoder_layers"),
        *("num_decoder_layers", "num_experts", "num_local_experts", "n_routed_experts", "first_k_dense_replace"),
    )
)

# of encoders: read where their classes are
LABEL_KEYS = ("id2label", "label2id", "problem_type")

# of encoders: accepted at these values alone; whatever stands there beyond them changes the computation
ENCODER_NEUTRAL: dict[str, tuple[object, ...]] = {
    "position_embedding_type": (None, "absolute"),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "quantization_config": (None,),
    "pruned_heads": (None, {}),
    "chunk_size_feed_forward": (None, 0),
    "auto_map": (None,),
}
ENCODER_IGNORED = (
    *("gradient_checkpointing", "attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"),
    *("directionality", "model_max_length", "tie_word_embeddings", "output_past", "dropout", "qa_dropout"),
    *("seq_classif_dropout", "tie_weights_", "summary_type", "summary_use_proj", "summary_activation"),
    *("summary_last_dropout",),
)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
}


def check_keys(
    values: Values,
    model_type: str,
    *,
    read: Collection[str],
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL_VALUES,
    ignored: Collection[str] = (),
) -> list[str]:
    """A note on the keys that were ignored; raises CheckpointError for keys or values that may change the computation.

    `read` are read elsewhere; those of `neutral` are ignored at the values that switch them off, those of `ignored` and
    of the common list always.
    """
    left_out, refused = sort_keys(values, read=read, neutral=neutral, ignored=ignored)
    if refused:
        raise CheckpointError(
            f"config.json: keys or values that are not supported for model_type {model_type} and may change "
            f"the computation: {'; '.join(refused)}; remove them only if you know that they do nothing"
        )
    return [f"ignored config keys: {', '.join(sorted(left_out))}"] if left_out else []


def sort_keys(
    values: Values, *, read: Collection[str], neutral: Mapping[str, tuple[object, ...]], ignored: Collection[str]
) -> tuple[list[str], list[str]]:
    """The keys that change nothing, and those, with their values, that may; see `check_keys`."""
    left_out, refused = [], []
    for key, value in values.items():
        if key in read:
            continue
        is_harmless = value in neutral[key] if key in neutral else key in ignored or key in _IGNORED_KEYS
        if is_harmless:
            left_out.append(key)
        else:
            refused.append(f"{key} = {value!r:.80}")
    return left_out, refused


def read_activation(key: str, name: object) -> Activation:
    """The activation that `name`, the value of `key`, stands for."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise CheckpointError(f"config.json: {key} {name!r} is not supported; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def or_default(values: Values, key: str, default: Any, notes: list[str]) -> Any:  # noqa: ANN401 - a JSON value
    """The value of `key`, or transformers' default, which is noted."""
    if values.get(key) is not None:
        return values[key]
    notes.append(f"{key} is absent; transformers' default {default!r} was taken")
    return default


def read_flag(values: Values, key: str, *, default: bool = False) -> bool:
    """A true or false, `default` where there is none; a null is refused where the default is true."""
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} must be true or false, got {value!r:.80}")
    if value is None and default and key in values:  # transformers has it off, unlike an absent key
        raise CheckpointError(f"config.json: {key} must be true or false, got null; state which")
    return default if value is None else value


def read_architectures(values: Values) -> tuple[str, ...]:
    """The class names of `architectures`, none where it is absent."""
    names = values.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise CheckpointError(f"config.json: architectures must be a list of class names, got {names!r:.80}")
    return tuple(names or ())


def read_integer(values: Values, key: str, *, positive: bool = True) -> int:
    """A whole number, above 0 unless `positive` is False."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or (positive and value < 1):
        raise CheckpointError(f"config.json: {key} must be a positive integer, got {value!r:.80}")
    if key in _COUNT_KEYS and value > MOST_COUNT:
        raise CheckpointError(f"config.json: {key} must be at most {MOST_COUNT}, got {value:.4g}; correct it")
    return value
