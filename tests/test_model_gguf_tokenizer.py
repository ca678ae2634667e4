"""GGUF vocabularies: ids equal the tokenizers they were made from, on text that is hard to cut."""

import io
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from graphport.model_def.checkpoint import CheckpointError
from graphport.model_def.gguf_file import read_gguf_file
from graphport.model_def.gguf_pre_tokenizers import PRE_TOKENIZERS
from graphport.model_def.gguf_tokenizer import chat_template, tokenizer_json

CORPUS = (
    "The quick brown fox doesn't jump; it's 3.14159 of 2,048 dogs' I'LL SAY!",
    "  leading, trailing   and    runs of spaces      ",
    "tabs\t\tand\nnewlines\r\n\r\n\n   mixed \n \t\n  in 42 rows\n    7 indented 8",
    "x  12 and\n    345  6   78901234567890 1.5e-10 0x1F ½ ² ③ Ⅷ ١٢٣ 一二",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # comment\n\n\nclass A(B):\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * c->d; } // 100%\n#include <stdio.h>",
    "👩‍👩‍👧‍👦 family, 🇩🇪🇯🇵 flags, 👍🏽 skin, ❤️ heart, 🏴󠁧󠁢󠁥󠁮󠁧󠁿 tag, 🤷🏿‍♀️",
    "東京は日本の首都です。北京是中国的首都。한국의 수도는 서울이다. 繁體中文，標點！",  # noqa: RUF001
    "العاصمة هي القاهرة، والحساب ٤٥٦. עברית עם נִקּוּד",
    "e\u0301 o\u0302\u0323 a\u030a n\u0303 vs é ộ å ñ; \u1112\u1161\u11ab vs 한; ﬁ ﬂ",
    "Здравствуй, мир! Ελληνικά 'ΑΒΓ' हिन्दी में ज़ू ไทยไม่มีช่องว่าง",
    "zero\u200bwidth\u200d joiner \u00a0nbsp\u2003em\u3000wide \ufeffbom \u0000nul \x1b[0m",
    "``'' “quotes” ‘single’ — dash … ¿qué? ¡sí! $5+€6=£7 <a href='b'>c</a> a^b~c|d",  # noqa: RUF001
    "",
    " ",
    "\n",
    "a",
)
PRE_NAMES = (
    *("smollm", "gpt-2", "qwen2", "llama-bpe", "smaug-bpe", "tekken", "gpt-4o", "command-r", "falcon", "olmo"),
    *("stablelm2", "deepseek-llm", "deepseek-coder", "viking", "seed-coder"),
)
OTHERS = {"smollm": "gpt-2", "qwen2": "llama-bpe", "gpt-4o": "tekken", "command-r": "smollm", "falcon": "olmo"}
OTHERS |= {"olmo": "gpt-2", "tekken": "qwen2", "stablelm2": "llama-bpe", "deepseek-llm": "deepseek-coder"}
OTHERS |= {"deepseek-coder": "smollm", "viking": "smollm", "seed-coder": "qwen2"}
SPECIAL = (
    "<|begin|>user\nHi there<|end|>\n<|begin|>assistant\n",
    "no space<|end|>around 12<|end|>34  <|end|>  5",
    "<|end|",
    "<think>\n\n</think> text",
)

_GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LIKE_GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_ASIAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# as the models' own tokenizer.json have them; "cased" is said by categories, of which deepseek-llm's has not all
_SPLITS = {
    "deepseek-llm": (
        *(r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"),
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
        *(r"\s+$", _ASIAN),
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN),
    "viking": (r" ?[^(\s|[.,!?…。，、।۔،])]+",),  # noqa: RUF001
    "seed-coder": (rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_LIKE_GPT4}",),
}


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A byte-level BPE whose merges cross every border, so that each pre-tokenizer gives other ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=alphabet, show_progress=False, special_tokens=["<|begin|>", "<|end|>"]
    )
    tokenizer.train_from_iterator([*CORPUS] * 3, trainer)
    return tokenizer


def _model(trained: Tokenizer) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(trained.to_str())["model"]
    return values


def _metadata(trained: Tokenizer, pre: str | None, **changes: Any) -> dict[str, Any]:
    model = _model(trained)
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<think>"]
    types = [1] * len(tokens)
    types[0] = types[1] = gguf.TokenType.CONTROL
    types[-1] = gguf.TokenType.USER_DEFINED
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def _read(metadata: dict[str, Any]) -> Tokenizer:
    text = tokenizer_json(metadata, where="x.gguf", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    assert text is not None
    return Tokenizer.from_str(text)


def _split_like(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _reference(trained: Tokenizer, pre: str) -> Tokenizer:
    """The tokenizer that a family ships, built from its own definition in tokenizers or transformers."""
    model = _model(trained)
    vocab = model["vocab"] | {"<think>": len(model["vocab"])}
    merges = [tuple(pair) for pair in model["merges"]]
    if pre == "gpt-2":
        reference = GPT2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    elif pre in ("qwen2", "stablelm2"):
        reference = Qwen2Tokenizer(
            vocab=vocab, merges=merges, eos_token="<|end|>", pad_token="<|end|>"
        ).backend_tokenizer
    else:
        whole_words = pre in ("llama-bpe", "tekken")
        reference = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
        llama3 = TikTokenConverter().pattern
        patterns = GGUF_PRE_TOKENIZER_SPLITS | {"llama-bpe": llama3, "smaug-bpe": llama3}
        byte_level, triples = pre_tokenizers.ByteLevel(add_prefix_space=False), Regex("[0-9][0-9][0-9]")
        split, marks = pre_tokenizers.Split(triples, behavior="isolated"), pre_tokenizers.Punctuation("contiguous")
        digits, falcon = [pre_tokenizers.Digits(True), byte_level], [marks, byte_level, pre_tokenizers.Digits(), split]
        sequence = {"smollm": digits, "command-r": digits, "falcon": falcon, "olmo": [byte_level]}.get(pre)
        if pre in _SPLITS:
            cuts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in _SPLITS[pre]]
            plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            sequence = [*cuts, *([] if pre == "seed-coder" else [pre_tokenizers.Digits(True)]), plain]
        reference.pre_tokenizer = pre_tokenizers.Sequence(sequence) if sequence else _split_like(patterns[pre])
        reference.normalizer = normalizers.NFC() if pre in ("command-r", "olmo") else reference.normalizer
    reference.post_processor = None
    reference.add_special_tokens(["<|begin|>", "<|end|>"])
    reference.add_tokens(["<think>"])
    return reference


@pytest.mark.parametrize("pre", PRE_NAMES)
def test_ids_equal_the_tokenizer_that_the_family_ships(pre: str, trained: Tokenizer) -> None:
    mine, reference = _read(_metadata(trained, pre)), _reference(trained, pre)
    for text in CORPUS + SPECIAL:
        assert mine.encode(text).ids == reference.encode(text).ids, text


@pytest.mark.parametrize("pre", OTHERS)
def test_the_corpus_tells_pre_tokenizers_apart(pre: str, trained: Tokenizer) -> None:
    mine, reference = _read(_metadata(trained, pre)), _reference(trained, OTHERS[pre])
    assert any(mine.encode(text).ids != reference.encode(text).ids for text in CORPUS)


def _cut(pieces: list[str], pattern: str) -> list[str]:
    """llama.cpp's unicode_regex_split: matches and what lies between them become pieces."""
    cut = []
    for piece in pieces:
        at = 0
        for match in regex.finditer(pattern, piece):
            cut += [piece[at : match.start()], match.group()]
            at = match.end()
        cut.append(piece[at:])
    return [piece for piece in cut if piece]


_DEFAULT_CUTS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_REGEX, r"\p{N}+", "[0-9][0-9][0-9]")
_CASES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_YOUTU_CUTS = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CASES}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CASES}"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@pytest.mark.parametrize(("pre", "cuts"), [("default", _DEFAULT_CUTS), (None, _DEFAULT_CUTS), ("youtu", _YOUTU_CUTS)])
def test_what_no_tokenizer_json_defines_is_cut_as_llama_cpp_does(
    pre: str | None, cuts: tuple[str, ...], trained: Tokenizer
) -> None:
    model, merges = _model(trained), [tuple(pair) for pair in _model(trained)["merges"]]
    plain = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, ignore_merges=pre == "youtu"))

    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    mine = _read(_metadata(trained, pre))
    for text in CORPUS:
        pieces = [text]
        for pattern in cuts:
            pieces = _cut(pieces, pattern)
        assert mine.encode(text).ids == [number for piece in pieces for number in plain.encode(piece).ids], text


def test_every_pre_tokenizer_of_the_table_decodes_what_it_encodes(trained: Tokenizer) -> None:
    for kind in PRE_TOKENIZERS:
        for name in kind.names:
            mine = _read(_metadata(trained, name))
            for text in CORPUS:
                expected = text if kind.form is None else normalizers.NFC().normalize_str(text)
                assert mine.decode(mine.encode(text).ids, skip_special_tokens=False) == expected


def test_control_tokens_are_special_and_user_defined_ones_are_not(trained: Tokenizer) -> None:
    mine = _read(_metadata(trained, "smollm"))
    ids = mine.encode("<|begin|>a<think>b<|end|>").ids
    think = mine.token_to_id("<think>")
    assert (ids[0], ids[-1], think in ids) == (0, 1, True)
    assert mine.decode(ids, skip_special_tokens=True) == "a<think>b"
    assert mine.get_vocab_size() == think + 1


@pytest.mark.parametrize(
    ("pre", "changes", "begin", "end"),
    [
        ("smollm", {}, [], []),
        ("smollm", {"add_bos_token": True}, [0], []),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, [0], [1]),
        ("smollm", {"add_eos_token": True}, [], [1]),
        ("llama-bpe", {}, [], []),
        ("llama-bpe", {"add_bos_token": None}, [0], []),
    ],
)
def test_begin_and_end_tokens_are_added_as_the_file_says(
    pre: str, changes: dict[str, Any], begin: list[int], end: list[int], trained: Tokenizer
) -> None:
    metadata = _metadata(trained, pre, **changes)
    metadata = {key: value for key, value in metadata.items() if value is not None}
    mine = _read(metadata)
    inner = mine.encode("a b", add_special_tokens=False).ids
    assert mine.encode("a b").ids == begin + inner + end
    assert mine.encode("a b", "a b").ids == (begin + inner + end) * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "gemma9"}, r"tokenizer.ggml.pre 'gemma9' is not known, so ids could be wrong; known are smollm"),
        ({"model": "bert"}, r"tokenizer.ggml.model 'bert' is not read; known are gpt2, llama"),
        ({"merges": ["<| q"]}, r"the merge '<\|' 'q' does not fit the vocabulary"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos is added to every text, but .*bos_token_id is None"),
        ({"add_eos_token": True, "eos_token_id": 10**6}, "eos is added to every text, but .*eos_token_id is 1000000"),
        ({"tokens": ["a", "b", "a"]}, "has the token 'a' twice"),
    ],
)
def test_vocabularies_that_are_not_understood_are_refused_by_name(
    changes: dict[str, Any], message: str, trained: Tokenizer
) -> None:
    with pytest.raises(CheckpointError, match=rf"x\.gguf: .*{message}"):
        _read(_metadata(trained, "smollm") | {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(trained: Tokenizer) -> None:
    with pytest.raises(CheckpointError, match=r"the vocabulary has \d+ tokens, the embedding 7 rows"):
        tokenizer_json(_metadata(trained, "smollm"), where="x.gguf", vocab_size=7)


def test_missing_merges_are_refused(trained: Tokenizer) -> None:
    metadata = _metadata(trained, "smollm")
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges is missing"):
        _read(metadata)


def test_a_file_without_vocabulary_has_no_tokenizer() -> None:
    assert tokenizer_json({}, where="x.gguf", vocab_size=7) is None


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tokenizer.chat_template": "{{ x }}"}, "{{ x }}"),
        ({"tokenizer.chat_template.default": "d", "tokenizer.chat_template.rag": "r"}, "d"),
        ({}, None),
    ],
)
def test_chat_template_is_the_default_one(metadata: dict[str, Any], expected: str | None) -> None:
    assert chat_template(metadata) == expected


@pytest.fixture(scope="module")
def sentence_model() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE as Llama 2's: byte fallback, identity normaliser, dummy prefix, digits split."""
    model = io.BytesIO()
    lines = [line for text in CORPUS for line in text.replace("\0", "").splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.98,
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _sentence_metadata(model: sentencepiece.SentencePieceProcessor, **changes: Any) -> dict[str, Any]:
    def kind(number: int) -> int:
        checks = ((model.is_unknown, 2), (model.is_control, 3), (model.is_byte, 6))
        if model.id_to_piece(number) == "<think>":
            return 4
        return next((value for check, value in checks if check(number)), 1)

    numbers = range(model.get_piece_size())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(number) for number in numbers],
        "tokenizer.ggml.scores": [model.get_score(number) for number in numbers],
        "tokenizer.ggml.token_type": [kind(number) for number in numbers],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_sentencepiece_ids_and_texts_equal_the_sentencepiece_library(
    sentence_model: sentencepiece.SentencePieceProcessor,
) -> None:
    mine = _read(_sentence_metadata(sentence_model))
    for text in CORPUS:
        expected = sentence_model.encode(text)
        assert mine.encode(text, add_special_tokens=False).ids == expected, text
        assert mine.encode(text).ids == [sentence_model.bos_id(), *expected]
        assert mine.decode(expected) == text


def test_a_sentencepiece_merge_order_by_id_alone_would_be_noticed(
    sentence_model: sentencepiece.SentencePieceProcessor,
) -> None:
    metadata = _sentence_metadata(sentence_model)
    mine = _read(metadata | {"tokenizer.ggml.scores": [-score for score in metadata["tokenizer.ggml.scores"]]})
    assert any(mine.encode(text, add_special_tokens=False).ids != sentence_model.encode(text) for text in CORPUS)


def test_sentencepiece_without_prefix_space_keeps_the_text(
    sentence_model: sentencepiece.SentencePieceProcessor,
) -> None:
    mine = _read(_sentence_metadata(sentence_model, add_space_prefix=False, add_bos_token=False))
    ids = mine.encode("fox").ids
    assert ids == mine.encode("fox", add_special_tokens=False).ids
    assert mine.id_to_token(ids[0])[0] == "f"
    assert mine.decode(mine.encode(" fox").ids) == " fox"


def test_a_sentencepiece_vocabulary_without_scores_is_refused(
    sentence_model: sentencepiece.SentencePieceProcessor,
) -> None:
    with pytest.raises(CheckpointError, match="needs one score and one token_type a token"):
        _read(_sentence_metadata(sentence_model, scores=[0.0]))


@pytest.mark.real
def test_smollm2_ids_equal_its_original_tokenizer(smollm2_gguf: Path) -> None:
    """The original pre-tokenizer is Digits + ByteLevel; transformers' GGUF reader forgets the digits."""
    mine = _read(read_gguf_file(smollm2_gguf).metadata)
    loaded = AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)
    without_digits = loaded.backend_tokenizer
    original = Tokenizer.from_str(without_digits.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    original.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    original.decoder = decoders.ByteLevel()
    for text in CORPUS + tuple(text.replace("begin", "im_start").replace("<|end", "<|im_end") for text in SPECIAL):
        assert mine.encode(text).ids == original.encode(text).ids, text
        assert mine.decode(mine.encode(text).ids, skip_special_tokens=False) == text
        if not regex.search(r"\s\p{N}", text):
            assert mine.encode(text).ids == without_digits.encode(text).ids, text
    assert any(mine.encode(text).ids != without_digits.encode(text).ids for text in CORPUS)
