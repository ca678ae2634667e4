"""Tokenizers small enough to train in a test: byte-level BPE, Metaspace, byte fallback, and rarer decoders.

Out: `tokenizers.Tokenizer`s trained on the lines below, and folders as a bundle has them. No download.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = (
    "The capital of France is Paris.",
    "Hello, world! How are you today?",
    "  two leading spaces, and two trailing ones  ",
    "a\tb\tc and\n\nblank lines\r\n",
    "def add(a: int, b: int) -> int:\n    return a + b",
    'print(f"{value:>10.3f}") # {"key": ["ab","c"]}',
    "for (int i = 0; i < n; ++i) { sum += x[i]; }",
    "SELECT name, COUNT(*) FROM users WHERE id != 42 GROUP BY name;",
    "<html><body class='x'>&nbsp;</body></html>",
    "Größe, Straße, Übermut, naïve café, señor, Ångström",
    "e\u0301 combining, a\u030a\u0323 stacked",
    "敏捷的棕色狐狸跳过懒狗。",
    "今日は良い天気ですね。東京タワー",
    "한국어 문장을 하나 씁니다. 안녕하세요",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "שלום עולם",
    "Привет, мир! Быстрая лиса",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "👋🌍 emoji 😀😃😄 and 🤗",
    "family 👨‍👩‍👧‍👦 joined, flags 🇫🇷🇯🇵, skin 👍🏽",
    "∑ x² ≤ ∫ f(x) dx → ∞, Δ Σ Ω",
    "https://example.org/path?q=1&r=2#frag",
    "user@example.org, +49 30 1234567, 3.14159, 1,000,000",
    "The quick brown fox jumps over the lazy dog.",
    "tokens, tokenizer, tokenized, tokenization",
    "the the the of of and and to to in in",
) * 2

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool>", "▁added▁", "émoji😀", " spaced ")  # added, not special; inside and outside a byte alphabet
_ADDED_TOKENS = [AddedToken(text, normalized=False) for text in ADDED]


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """GPT-2's kind: every byte has an id."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _trained(tokenizer, trainer)


def metaspace() -> Tokenizer:
    """SentencePiece's kind with T5's decoder: the first token loses its leading spaces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _trained(tokenizer, _bpe_trainer())


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: unknown characters are byte tokens; one leading space is stripped from the whole text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.train_from_iterator(LINES, _bpe_trainer(limit_alphabet=60))
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})  # not special, as in Llama 2
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.add_tokens(_ADDED_TOKENS)
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind: words joined by spaces, tidied before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=list(SPECIAL), show_progress=False)
    return _trained(tokenizer, trainer)


def end_of_word() -> Tokenizer:
    """The first BPE kind: a suffix marks the end of a word, and the last word's is dropped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), end_of_word_suffix="</w>", show_progress=False
    )
    return _trained(tokenizer, trainer)


def no_decoder() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    tokenizer = metaspace()
    tokenizer.decoder = None
    return tokenizer


def odd_strip() -> Tokenizer:
    """Strips two leading and three trailing spaces of the fused text, and replaces a character of it."""
    tokenizer = byte_fallback()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Fuse(), decoders.Replace("e", "EE"), decoders.Replace("▁", " "), decoders.Strip(" ", 2, 3)]
    )
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "metaspace": metaspace,
    "byte_fallback": byte_fallback,
    "word_piece": word_piece,
    "end_of_word": end_of_word,
    "no_decoder": no_decoder,
    "odd_strip": odd_strip,
}


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """Put `<s>` before every text that is encoded with special tokens."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, chat_template: str | None = None) -> Path:
    """Write the files that a bundle has."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    return folder


def _bpe_trainer(*, limit_alphabet: int = 1000) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), limit_alphabet=limit_alphabet, show_progress=False
    )


def _trained(tokenizer: Tokenizer, trainer: object) -> Tokenizer:
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens(_ADDED_TOKENS)
    return tokenizer
