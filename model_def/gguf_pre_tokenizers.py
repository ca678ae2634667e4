"""How the byte-level vocabularies of GGUF files cut text, by the name in `tokenizer.ggml.pre`.

In: nothing. Out: `PRE_TOKENIZERS`, one record a way of cutting. The vocabulary is read in `gguf_tokenizer.py`.
"""

from dataclasses import dataclass
from typing import Literal

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED_CODER = _QWEN2.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# the letters with a case of deepseek-llm's tokenizer.json. llama.cpp has some of them in another, canonically equal
# form, so that three of its ranges run backwards
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_MARKS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_VIKING = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_YOUTU_ASIAN = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    r"\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_YOUTU = _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text: `splits` one after the other, every match a piece of its own.

    `byte_splits` cut what bytes are spelled as, after the others. `whole_words`: a piece that is a token needs no
    merges. `adds_bos` and `form` (Unicode) as the original tokenizer.
    """

    names: tuple[str, ...]
    splits: tuple[str, ...]
    byte_splits: tuple[str, ...] = ()
    whole_words: bool = False
    adds_bos: bool = False
    form: Literal["NFC"] | None = None


# tokenizer.ggml.pre by the tokenizer.json of the models, and by llama.cpp's src/llama-vocab.cpp for `default` and for
# those whose tokenizer.json was not at hand (a.x-4.0, gigachat, granite-docling, joyai-llm, kanana2, kormo, megrez,
# mellum, midm-2.0, trillion, youtu)
PRE_TOKENIZERS = (
    PreTokenizer(
        names=("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), splits=(r"\p{N}", _GPT2)
    ),
    PreTokenizer(
        names=(
            *("gpt-2", "phi-2", "mpt", "jais", "exaone4"),
            *("a.x-4.0", "gigachat", "granite-docling", "mellum", "trillion"),
        ),
        splits=(_GPT2,),
    ),
    PreTokenizer(names=("olmo",), splits=(_GPT2,), form="NFC"),  # GPT-NeoX's, which llama.cpp calls so too
    PreTokenizer(
        names=("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
        splits=(_LLAMA3,),
        whole_words=True,
        adds_bos=True,
    ),
    PreTokenizer(names=("smaug-bpe", "dbrx"), splits=(_LLAMA3,)),
    PreTokenizer(names=("tekken",), splits=(_TEKKEN,), whole_words=True, adds_bos=True),
    PreTokenizer(names=("qwen2", "deepseek-r1-qwen", "f2llmv2", "stablelm2"), splits=(_QWEN2,), form="NFC"),
    PreTokenizer(names=("kormo", "megrez"), splits=(_QWEN2,)),
    PreTokenizer(names=("seed-coder",), splits=(_SEED_CODER,)),
    PreTokenizer(names=("gpt-4o", "kanana2"), splits=(_GPT4O,)),
    PreTokenizer(names=("youtu",), splits=(_YOUTU_ASIAN, _YOUTU), whole_words=True),
    PreTokenizer(
        names=("deepseek-llm",),
        splits=(r"[\r\n]", rf"\s?[{_CASED}]+", _MARKS, r"\s+$", _CJK, r"\p{N}"),
        adds_bos=True,
    ),
    PreTokenizer(
        names=("deepseek-coder",), splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"), adds_bos=True
    ),
    PreTokenizer(
        names=("deepseek-v3", "joyai-llm"),
        splits=(r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3),
        adds_bos=True,
    ),
    PreTokenizer(names=("viking",), splits=(_VIKING, r"\p{N}")),
    PreTokenizer(names=("command-r",), splits=(r"\p{N}", _GPT2), adds_bos=True, form="NFC"),
    PreTokenizer(names=("falcon",), splits=(r"[\p{P}$+<=>^`|~]+", _GPT2), byte_splits=(r"\p{N}+", r"[0-9][0-9][0-9]")),
    PreTokenizer(names=("default",), splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
)
