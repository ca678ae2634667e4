"""Folders that are not one model: adapters, and configurations that join several models.

In: a folder, or a parsed config.json. Out: nothing, or an error that names what is there and which part is read alone.
"""

from collections.abc import Collection
from pathlib import Path

from graphport.model_def.checkpoint_record import CheckpointError, read_json
from graphport.model_def.huggingface_values import Values

ADAPTER_FILE = "adapter_config.json"

# what of peft opens an adapter's base with it, by the adapter's task_type
_OPENERS = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}


def refuse_adapter(folder: Path) -> None:
    """Raise CheckpointError for a folder of an adapter, which has no model of its own."""
    if not (folder / ADAPTER_FILE).is_file():
        return
    values = read_json(folder / ADAPTER_FILE)
    base = values.get("base_model_name_or_path")
    opener = _OPENERS.get(str(values.get("task_type")), "AutoPeftModelForCausalLM")
    raise CheckpointError(
        f"{folder} is an adapter ({ADAPTER_FILE}){f' of {base}' if base else ''}, not a model; merge it into its base "
        f"first: {opener}.from_pretrained(folder).merge_and_unload().save_pretrained(new_folder) of peft"
    )


def refuse_joined(values: Values, readable: Collection[str]) -> None:
    """Raise CheckpointError for a configuration of several models; `readable`: the model_types that are read."""
    parts = {key: part["model_type"] for key, part in values.items() if isinstance(part, dict) and "model_type" in part}
    if not parts:
        return
    named = ", ".join(f"{key} is {model_type}" for key, model_type in parts.items())
    alone = [f"{key} ({model_type})" for key, model_type in parts.items() if model_type in readable]
    advice = "none of them is a model that is read"
    if alone:
        advice = (
            f"{' and '.join(alone)} can be exported, {'each ' if len(alone) > 1 else ''}saved to a folder of its own: "
            "see 'A part of a larger model' in docs/export.md"
        )
    raise CheckpointError(
        f"config.json: model_type {values.get('model_type')!r} joins several models, which are not read together: "
        f"{named}; {advice}"
    )
