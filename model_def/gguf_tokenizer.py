"""A GGUF file's vocabulary as the text of a `tokenizer.json`, and its chat template.

In: GGUF metadata. Out: texts. Byte-level BPE by the table of `gguf_pre_tokenizers.py`, SentencePiece BPE by its scores.
It tokenises nothing itself; the `tokenizers` package does.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

Metadata = Mapping[str, Any]  # scalars, texts and lists, as the file types them

_Item = TypeVar("_Item", str, int, float)

_SPECIAL_KEYS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

# of Phi-3's added tokens; the others swallow white space, which the file does not say
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def tokenizer_json(metadata: Metadata, *, where: str, vocab_size: int) -> str | None:
    """The text of tokenizer.json, or None when the file has no vocabulary.

    Raises CheckpointError for a tokenizer model or pre-tokenizer that is not known, and for a vocabulary that does not
    fit `vocab_size` or repeats a token.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab"):
        return None
    tokens = _list(metadata, "tokens", str, where) or []
    if len(tokens) != vocab_size:
        raise CheckpointError(f"{where}: the vocabulary has {len(tokens)} tokens, the embedding {vocab_size} rows")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise CheckpointError(f"{where}: the vocabulary has the token {repeated!r} twice")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, vocab, where)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(metadata, vocab, where), True
    else:
        raise CheckpointError(f"{where}: tokenizer.ggml.model {model!r} is not read; known are gpt2, llama")
    is_phi3 = model == "llama" and metadata.get("general.architecture") == "phi3"
    types = _list(metadata, "token_type", int, where) or []
    _add_tokens(tokenizer, tokens, types, swallow_spaces=is_phi3)
    _add_ends(tokenizer, metadata, where, adds_bos=metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    return str(tokenizer.to_str())


def chat_template(metadata: Metadata) -> str | None:
    """The Jinja text of the default chat template, None when the file has none."""
    template = metadata.get("tokenizer.chat_template", metadata.get("tokenizer.chat_template.default"))
    return None if template is None else str(template)


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """Texts of the special tokens that the metadata names by id."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in _SPECIAL_KEYS.items()}
    return {
        name: str(tokens[number]) for name, number in ids.items() if isinstance(number, int) and number < len(tokens)
    }


def _list(metadata: Metadata, key: str, kind: type[_Item], where: str) -> list[_Item] | None:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is not None and not (isinstance(values, list) and all(isinstance(item, kind) for item in values)):
        raise CheckpointError(f"{where}: tokenizer.ggml.{key} must be a list of {kind.__name__}, got {values!r:.80}")
    return values


def _byte_level(metadata: Metadata, vocab: dict[str, int], where: str) -> tuple[Tokenizer, bool]:
    """GPT-2's BPE over bytes spelled as letters, cut as `tokenizer.ggml.pre` says."""
    kind = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"), where)
    pairs = _list(metadata, "merges", str, where)
    if pairs is None:
        raise CheckpointError(f"{where}: tokenizer.ggml.merges is missing; a gpt2 vocabulary needs it")
    merges = [_halves(merge) for merge in pairs]
    for left, right in merges:  # tokenizers panics on these
        if not {left, right, left + right} <= vocab.keys():
            raise CheckpointError(f"{where}: the merge {left!r} {right!r} does not fit the vocabulary")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.whole_words))
    if kind.form is not None:
        tokenizer.normalizer = normalizers.NFC()
    splits, byte_splits = (
        [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in group]
        for group in (kind.splits, kind.byte_splits)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level, *byte_splits])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind.adds_bos


def _pre_tokenizer(name: str, where: str) -> PreTokenizer:
    for kind in PRE_TOKENIZERS:
        if name in kind.names:
            return kind
    known = ", ".join(known for kind in PRE_TOKENIZERS for known in kind.names)
    raise CheckpointError(
        f"{where}: tokenizer.ggml.pre {name!r} is not known, so ids could be wrong; known are {known}"
    )


def _halves(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(metadata: Metadata, vocab: dict[str, int], where: str) -> Tokenizer:
    """SentencePiece BPE with byte fallback; merges follow from the scores (a merge makes the best-scored token)."""
    scores, types = _list(metadata, "scores", float, where), _list(metadata, "token_type", int, where)
    if scores is None or types is None or not len(scores) == len(types) == len(vocab):
        raise CheckpointError(f"{where}: a llama vocabulary needs one score and one token_type a token")
    ranked = sorted((-scores[index], index, token) for token, index in vocab.items() if types[index] == _NORMAL)
    merges = [
        (token[:cut], token[cut:])
        for _, _, token in ranked
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = next((token for token, index in vocab.items() if types[index] == _UNKNOWN), None)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int], *, swallow_spaces: bool) -> None:
    """Control tokens become special, user-defined ones are matched whole but not special.

    `swallow_spaces`: with the white space behind them, all but _KEEP_SPACES.
    """
    added = [
        AddedToken(
            token,
            special=kind == _CONTROL,
            normalized=False,
            rstrip=swallow_spaces and token not in _KEEP_SPACES,
        )
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_ends(tokenizer: Tokenizer, metadata: Metadata, where: str, *, adds_bos: bool) -> None:
    """Begin and end tokens that encoding adds, through the post-processor."""
    wanted = {"bos": adds_bos, "eos": metadata.get("tokenizer.ggml.add_eos_token", False)}
    pieces, special = ["$A"], []
    for name, is_wanted in wanted.items():
        if not is_wanted:
            continue
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        token = None if number is None else tokenizer.id_to_token(number)
        if token is None:
            raise CheckpointError(
                f"{where}: {name} is added to every text, but tokenizer.ggml.{name}_token_id is {number}"
            )
        pieces = [name, *pieces] if name == "bos" else [*pieces, name]
        special.append({"id": name, "ids": [number], "tokens": [token]})
    if special:
        pair = [piece if piece != "$A" else "$B" for piece in pieces]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=pieces, pair=[*pieces, *(f"{piece}:1" for piece in pair)], special_tokens=special
        )
