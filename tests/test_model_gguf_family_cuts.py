"""How families cut text whose tokenizers no library has: DeepSeek-V3's pieces, white space behind Phi-3's tokens."""

from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from graphport.model_def.gguf_tokenizer import tokenizer_json

TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "<|user|>",
    "<|end|>",
    "<|endoftext|>",
    "<0x0A>",
    "\u2581",
    "h",
    "i",
    "\u2581h",
    "\u2581hi",
)
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
TYPES = (UNKNOWN, *[CONTROL] * 5, BYTE, *[NORMAL] * 5)
USER, END, LAST, NEWLINE = 3, 4, 5, 6


def _encode(text: str, architecture: str) -> list[int]:
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": list(TYPES),
        "tokenizer.ggml.scores": [-float(index) for index in range(len(TOKENS))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    written = tokenizer_json(metadata, where="x.gguf", vocab_size=len(TOKENS))
    assert written is not None
    return list(Tokenizer.from_str(written).encode(text).ids)


@pytest.mark.parametrize("spaces", ["", "\n", "\n\n", "  \n"])
def test_white_space_behind_phi3s_tokens_is_swallowed(spaces: str) -> None:
    assert _encode(f"<|user|>{spaces}<|end|>{spaces}", "phi3") == [USER, END]


def test_white_space_is_kept_behind_the_end_of_text_and_by_other_models() -> None:
    assert _encode("<|endoftext|>\n", "phi3")[0] == LAST
    assert _encode("<|endoftext|>\n", "phi3")[-1] == NEWLINE
    assert NEWLINE in _encode("<|user|>\n<|end|>", "llama")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab 1234567", ["ab", " ", "123", "456", "7"]),
        ("1 + x2=3", ["1", " +", " x", "2", "=", "3"]),
        ("f(abc) [Z]", ["f", "(abc", ")", " [", "Z", "]"]),
        ("it's, so", ["it", "'s", ",", " so"]),
        ("abc東京は日本", ["abc", "東京は日本"]),
        ("  two\n\n  lines", [" ", " two", "\n\n", " ", " lines"]),
        ("{\n}\t\n", ["{\n", "}", "\t\n"]),
    ],
)
def test_deepseek_v3_cuts_digits_by_threes_and_marks_with_what_follows(text: str, pieces: list[str]) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "deepseek-v3",
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.add_bos_token": False,
    }
    written = tokenizer_json(metadata, where="x.gguf", vocab_size=len(letters))
    assert written is not None
    cutter = Tokenizer.from_str(written).pre_tokenizer
    assert cutter is not None
    assert [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)] == pieces
