"""What a sentence-transformers folder adds to a checkpoint: pooling, normalisation, the longest text.

In: a Hugging Face folder. Out: `SentenceRecipe` with notes, from modules.json and the files that it names. It reads no
weights: a module with weights of its own (Dense) is refused by name.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphport.model_def.checkpoint_record import CheckpointError, read_json, read_json_list
from graphport.model_def.readout_config import PoolingConfig, PoolingKind

MODULES_FILE = "modules.json"
_LIMIT_FILE = "sentence_bert_config.json"
_PROMPTS_FILE = "config_sentence_transformers.json"

_MODES: dict[str, PoolingKind] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
# newer versions write one name instead of flags
_NAMES: dict[str, PoolingKind] = {
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceRecipe:
    """How hidden states become embeddings; `text_limit` is the longest text in tokens, None where none is stated."""

    pooling: PoolingConfig
    text_limit: int | None
    notes: tuple[str, ...]


def read_sentence_recipe(folder: Path, *, hidden_size: int) -> SentenceRecipe:
    """The recipe in `folder`; without modules.json the mean of the tokens, as sentence-transformers takes it.

    Raises CheckpointError for modules and poolings that are not supported.
    """
    if not (folder / MODULES_FILE).is_file():
        note = f"the folder has no {MODULES_FILE}: embeddings are the mean of the tokens, not normalised"
        return SentenceRecipe(pooling=PoolingConfig(), text_limit=None, notes=(note,))
    modules = [(_kind(module), str(module.get("path", ""))) for module in read_json_list(folder / MODULES_FILE)]
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointError(
            f"{folder / MODULES_FILE} lists {', '.join(kinds) or 'nothing'}; read are Transformer, Pooling and, after "
            "them, Normalize"
        )
    if modules[0][1]:
        raise CheckpointError(f"{folder / MODULES_FILE}: the Transformer lies in {modules[0][1]!r}; give that folder")
    kind = _pooling(_inside(folder, modules[1][1]) / "config.json", hidden_size)
    return SentenceRecipe(
        pooling=PoolingConfig(kind=kind, normalize="Normalize" in kinds),
        text_limit=_text_limit(folder),
        notes=_prompt_notes(folder),
    )


def _kind(module: object) -> str:
    """The class's name: the last part of sentence_transformers.models.Pooling."""
    return str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else repr(module)


def _inside(folder: Path, path: str) -> Path:
    if Path(path).name != path or path in ("", ".", ".."):
        raise CheckpointError(f"{folder / MODULES_FILE} names the folder {path!r}; modules lie directly in {folder}")
    return folder / path


def _pooling(path: Path, hidden_size: int) -> PoolingKind:
    values = read_json(path)
    width = values.get("word_embedding_dimension", values.get("embedding_dimension", hidden_size))
    if width != hidden_size:
        raise CheckpointError(f"{path}: pooling of {width} channels, the model has {hidden_size}")
    named = values.get("pooling_mode")
    if isinstance(named, str) and named in _NAMES:
        return _NAMES[named]
    on = [key for key, value in values.items() if key.startswith("pooling_mode_") and value is True]
    if named is not None or len(on) != 1 or on[0] not in _MODES:
        found = repr(named) if named is not None else ", ".join(on) or "none"
        raise CheckpointError(f"{path}: pooling {found} is not supported; needed is one of {', '.join(_MODES)}")
    return _MODES[on[0]]


def _text_limit(folder: Path) -> int | None:
    path = folder / _LIMIT_FILE
    values = read_json(path)
    if values.get("do_lower_case"):
        raise CheckpointError(
            f"{path}: do_lower_case is true, which is applied to the text before the tokenizer; put a Lowercase "
            "normalizer into tokenizer.json and set it to false"
        )
    limit = values.get("max_seq_length")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise CheckpointError(f"{path}: max_seq_length must be a whole number of at least 1, got {limit!r}")
    return limit


def _prompt_notes(folder: Path) -> tuple[str, ...]:
    values: dict[str, Any] = read_json(folder / _PROMPTS_FILE)
    prompts = {name: text for name, text in (values.get("prompts") or {}).items() if text}
    if not prompts:
        return ()
    named = ", ".join(f"{name} {text!r}" for name, text in prompts.items())
    return (f"prompts are not added to texts, write them in front yourself: {named}",)
