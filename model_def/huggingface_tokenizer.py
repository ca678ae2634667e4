"""The text side of a Hugging Face folder: tokenizer.json, chat template, begin, end and padding ids.

In: a folder. Out: texts and ids as they are stored; `tokenizer.model` alone is converted by transformers.
It tokenises nothing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphport.model_def.checkpoint_record import CheckpointError, end_ids, first_id, read_json
from graphport.model_def.signature import SPECIAL_TOKEN_NAMES, GenerationDefaults

TOKENIZER_FILE = "tokenizer.json"
_SLOW_FILES = ("tokenizer.model", "vocab.json")

Values = Mapping[str, Any]  # parsed JSON


def read_tokenizer_json(folder: Path) -> tuple[str | None, list[str]]:
    """The text of tokenizer.json as it is (converted when only tokenizer.model or vocab.json exist), and notes.

    Raises CheckpointError when a file is no JSON or the conversion fails.
    """
    path = folder / TOKENIZER_FILE
    if path.is_file():
        read_json(path)
        return path.read_text(encoding="utf-8"), []
    slow = [name for name in _SLOW_FILES if (folder / name).is_file()]
    if not slow:
        return None, [f"the folder has no {TOKENIZER_FILE}; text cannot be encoded"]
    return _convert(folder, slow[0]), [f"{TOKENIZER_FILE} was made from {slow[0]} by transformers"]


def _convert(folder: Path, name: str) -> str:
    from transformers import AutoTokenizer  # slow to import, and rarely needed

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        text: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # transformers and the format's library raise many types, all meaning the same here
        raise CheckpointError(
            f"{folder / name} could not be converted to {TOKENIZER_FILE} ({error}); save the folder once with "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        ) from error
    return text


def read_chat_template(folder: Path) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's chat_template (of several the one named default)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_json(folder / "tokenizer_config.json").get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        named = {entry["name"]: entry["template"] for entry in template}
        return str(named["default"])
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a text or a list of named texts, one of them "
            f"default; got {json.dumps(template)[:200]}"
        ) from error


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the special tokens that tokenizer_config.json names: bos_token, eos_token, ..."""
    config = read_json(folder / "tokenizer_config.json")
    entries = {name: config.get(name) for name in SPECIAL_TOKEN_NAMES}
    texts = {name: entry.get("content") if isinstance(entry, dict) else entry for name, entry in entries.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_mask_id(folder: Path, tokenizer_json: str | None) -> int | None:
    """The id of the token that stands for a missing one, None where the tokenizer names none."""
    tokenizer = json.loads(tokenizer_json) if tokenizer_json else {}
    return _token_id(tokenizer, read_json(folder / "tokenizer_config.json"), "mask_token", [])


def read_generation(
    folder: Path, config: Values, tokenizer_json: str | None, *, vocab_size: int
) -> tuple[GenerationDefaults, list[str]]:
    """Begin, padding and all end ids: the union over generation_config.json, config.json and the tokenizer's eos_token.

    Raises CheckpointError for an end or begin id outside the vocabulary.
    """
    generation = read_json(folder / "generation_config.json")
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    named = any(tokenizer_config.get(key) is not None for key in ("eos_token", "bos_token", "pad_token"))
    tokenizer = json.loads(tokenizer_json) if tokenizer_json and named else {}
    notes: list[str] = []
    from_text = _token_id(tokenizer, tokenizer_config, "eos_token", notes)
    candidates = [generation.get("eos_token_id"), config.get("eos_token_id"), from_text]
    begin = [
        generation.get("bos_token_id"),
        config.get("bos_token_id"),
        _token_id(tokenizer, tokenizer_config, "bos_token", notes),
    ]
    padding = [
        generation.get("pad_token_id"),
        config.get("pad_token_id"),
        _token_id(tokenizer, tokenizer_config, "pad_token", notes),
    ]
    defaults = GenerationDefaults(
        eos_token_ids=end_ids(candidates, vocab_size=vocab_size, where=str(folder)),
        bos_token_id=first_id("bos_token_id", begin, vocab_size, notes),
        pad_token_id=first_id("pad_token_id", padding, vocab_size, notes),
    )
    return defaults, notes


def _token_id(tokenizer: Values, tokenizer_config: Values, key: str, notes: list[str]) -> int | None:
    """The id of a token that tokenizer_config.json names by its text."""
    token = tokenizer_config.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if text is None:
        return None
    for number, entry in tokenizer_config.get("added_tokens_decoder", {}).items():
        if entry.get("content") == text:
            return int(number)
    for entry in tokenizer.get("added_tokens", []):
        if entry.get("content") == text:
            return int(entry["id"])
    vocab = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocab, dict) and text in vocab:
        return int(vocab[text])
    notes.append(f"tokenizer_config.json names {key} {text!r}, which the tokenizer does not hold; left out")
    return None
