"""The tokenizer: ids and texts of the library, streams that join to the one-shot decode, damaged files refused."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import KINDS, LINES, byte_level, metaspace, with_bos, write_folder
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from graphport.runtime.chat_template_error import ChatTemplateError
from graphport.runtime.tokenizer import Tokenizer

HARD_TEXTS = (
    "family 👨‍👩‍👧‍👦 and 👩🏽‍🚀",
    "🇫🇷🇯🇵🇧🇷",
    "안녕하세요 한국어",
    "مرحبا بالعالم",
    "e\u0301a\u030a\u0323",
    "日本語\n\n  中文\t \r\n",
    " leading, trailing ",
    "   ",
    "",
)

RAW = {kind: make() for kind, make in KINDS.items()}  # trained once: ids differ between trainings
TOKENIZERS = {kind: Tokenizer(raw) for kind, raw in RAW.items()}


def streamed(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip_special_tokens)
    return [*map(stream.push, ids), stream.flush()]


def random_ids(kind: str, rng: random.Random) -> list[int]:
    tokenizer = TOKENIZERS[kind]
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(40))]
    if rng.random() < 0.3:
        ids = tokenizer.encode(rng.choice(LINES + HARD_TEXTS)) + ids
    # the library's own decoder panics when a text is shorter than what Strip may take from it
    return tokenizer.encode("  xyz") + ids if kind == "odd_strip" else ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_b118_b120_streamed_text_of_random_ids_is_the_one_shot_decode(kind: str, skip: bool) -> None:
    rng = random.Random(f"{kind}{skip}")
    for _ in range(500):
        ids = random_ids(kind, rng)
        pieces = streamed(TOKENIZERS[kind], ids, skip_special_tokens=skip)
        assert "".join(pieces) == TOKENIZERS[kind].decode(ids, skip_special_tokens=skip), ids
        "".join(pieces).encode("utf-8")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_b118_any_unicode_text_streams_without_replacement_characters(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    pieces = streamed(tokenizer, tokenizer.encode(text), skip_special_tokens=False)
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_b118_hard_texts_stream_whole_characters_only(text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, ids)) == text
    assert len(ids) >= len(text.split())


def test_b118_decoding_each_token_alone_would_fail_this_suite() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("😀 안")
    alone = "".join(tokenizer.decode([id_]) for id_ in ids)
    assert "\ufffd" in alone
    assert alone != "".join(streamed(tokenizer, ids)) == "😀 안"


def test_b118_lone_bytes_become_replacement_characters_only_once_they_are_certain() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    first, second, *_ = byte_level_ids("é")
    assert streamed(tokenizer, [first]) == ["", "\ufffd"]
    assert streamed(tokenizer, [first, second]) == ["", "é", ""]
    assert streamed(tokenizer, [second]) == ["\ufffd", ""]
    assert streamed(tokenizer, [first, first, second]) == ["", "\ufffd", "é", ""]


def byte_level_ids(text: str) -> list[int]:
    """One id a byte, whatever merges were learned."""
    characters = bytes_to_unicode()
    return [RAW["byte_level"].token_to_id(characters[byte]) for byte in text.encode()]


def test_b118_a_byte_fallback_run_is_held_until_it_ends_because_one_bad_byte_spoils_it() -> None:
    raw, tokenizer = RAW["byte_fallback"], TOKENIZERS["byte_fallback"]
    c3, a9, e = (raw.token_to_id(token) for token in ("<0xC3>", "<0xA9>", "e"))
    assert streamed(tokenizer, [e, c3, a9, e]) == ["e", "", "", "ée", ""]
    assert streamed(tokenizer, [e, c3, a9, c3, e]) == ["e", "", "", "", "\ufffd\ufffd\ufffde", ""]


def test_b118_the_library_stream_has_the_faults_that_ours_avoids() -> None:
    raw = RAW["byte_fallback"]
    c3, a9, e = (raw.token_to_id(token) for token in ("<0xC3>", "<0xA9>", "e"))
    stream = decoders.DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        [stream.step(raw, id_) for id_ in (e, c3, a9, c3, e)]
    stream = decoders.DecodeStream(skip_special_tokens=True)
    assert stream.step(RAW["byte_level"], byte_level_ids("é")[0]) is None  # and it has no flush: the text is lost


@pytest.mark.parametrize("kind", ["metaspace", "byte_fallback"])
def test_b120_spaces_between_words_and_leading_spaces_survive_streaming(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    for text in ("The capital of France", "  two leading", "a\n\n b"):
        ids = tokenizer.encode(text)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
    assert tokenizer.decode(tokenizer.encode("the fox and the dog")) == "the fox and the dog"


def test_b120_special_tokens_are_dropped_or_shown_as_asked_and_added_ones_always_shown() -> None:
    for kind in ("byte_level", "metaspace", "byte_fallback"):
        tokenizer = TOKENIZERS[kind]
        ids = tokenizer.encode("hello<|im_end|><tool> x", add_special_tokens=False)
        assert "<|im_end|>" not in "".join(streamed(tokenizer, ids))
        assert "<tool>" in "".join(streamed(tokenizer, ids))
        assert "<|im_end|>" in "".join(streamed(tokenizer, ids, skip_special_tokens=False))


def test_a_token_costs_the_same_however_long_the_text_is() -> None:
    rng = random.Random(3)
    for kind in ("byte_level", "metaspace", "byte_fallback"):
        tokenizer = TOKENIZERS[kind]
        ids = [rng.randrange(5, 261) for _ in range(20000)]

        def seconds(ids: list[int], tokenizer: Tokenizer = tokenizer) -> float:
            stream = tokenizer.stream()
            start = time.process_time()
            for id_ in ids:
                stream.push(id_)
            return time.process_time() - start

        short = min(seconds(ids[:1000]) for _ in range(5))
        long = min(seconds(ids) for _ in range(2))
        assert long < 20 * short * 4, f"{kind}: 20 times the tokens took {long / short:.0f} times as long"


def test_a_stream_ends_with_flush() -> None:
    stream = TOKENIZERS["byte_level"].stream()
    assert stream.flush() == ""
    assert stream.flush() == ""
    with pytest.raises(ValueError, match="open a new stream"):
        stream.push(7)


def test_a_decoder_that_cannot_be_followed_is_refused_by_name() -> None:
    raw = metaspace()
    raw.decoder = decoders.CTC()
    with pytest.raises(ValueError, match=r"decoder \(CTC\) cannot be streamed"):
        Tokenizer(raw).stream()
    raw.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")])
    with pytest.raises(ValueError, match=r"Fuse -> Replace.*after the tokens were fused"):
        Tokenizer(raw).stream()


def test_encode_and_decode_equal_the_library_and_transformers(tmp_path: Path) -> None:
    raw = with_bos(byte_level())
    tokenizer = Tokenizer.load(write_folder(tmp_path, raw))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in LINES + HARD_TEXTS:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == reference(text, add_special_tokens=special)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(reference)


def test_truncation_and_padding_of_the_file_never_change_a_text(tmp_path: Path) -> None:
    raw = byte_level()
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    tokenizer = Tokenizer.load(write_folder(tmp_path, raw))
    assert tokenizer.decode(tokenizer.encode("The capital of France is Paris.")) == "The capital of France is Paris."


def test_load_names_the_file_that_is_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    folder = write_folder(tmp_path / "a", byte_level(), "{% if %}")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja: .*does not compile"):
        Tokenizer.load(folder).compile_chat_template()
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: .*decode"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("[1", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged"):
        Tokenizer.load(folder)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(folder)


def test_text_must_be_unicode_text() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    with pytest.raises(ValueError, match=r"lone surrogate \(U\+D83D at character 2\)"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(TypeError, match="must be str, not bytes"):
        tokenizer.encode(b"ab")


@pytest.mark.parametrize("bad", [-1, 404, 2**40])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert tokenizer.vocab_size == 404
    with pytest.raises(ValueError, match=rf"token id {bad} is not in"):
        tokenizer.decode([5, bad])
    if bad < 2**32:
        with pytest.raises(ValueError, match=rf"token id {bad} is not in"):
            tokenizer.stream().push(bad)


def test_decode_refuses_what_is_no_integer() -> None:
    with pytest.raises(TypeError, match="must be an integer, not True"):
        TOKENIZERS["byte_level"].decode([True])


TURNS = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize("template_has_bos", [True, False])
@pytest.mark.parametrize("tokenizer_adds_bos", [True, False])
@pytest.mark.parametrize("text", ["Hi there", "<s>Hi", "<|im_end|> in the text", "  é👋 "])
def test_b121_chat_ids_equal_the_reference(
    tmp_path: Path, template_has_bos: bool, tokenizer_adds_bos: bool, text: str
) -> None:
    template = ("{{ bos_token }}" if template_has_bos else "") + TURNS + PROMPT
    raw = with_bos(byte_level()) if tokenizer_adds_bos else byte_level()
    tokenizer = Tokenizer.load(write_folder(tmp_path, raw, template))
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    for prompt in (True, False):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
        assert ids == reference.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=prompt, return_dict=False
        )
        assert ids.count(raw.token_to_id("<s>")) == template_has_bos + text.startswith("<s>")
    broken = tokenizer.encode(tokenizer.render_chat_template(messages))
    assert (broken != tokenizer.apply_chat_template(messages)) == tokenizer_adds_bos  # the fault this row is about


def test_b121_a_special_token_nobody_names_is_an_error_not_an_empty_string(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), "{{ bos_token }}" + TURNS)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ChatTemplateError, match=r"uses bos_token, but nothing says.*tokenizer_config\.json"):
        Tokenizer.load(folder).apply_chat_template([{"role": "user", "content": "x"}])


def test_a_model_without_a_chat_template_says_so() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match=r"no chat_template\.jinja: give it plain text"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_the_runtime_tokenizer_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level(), TURNS)
    code = (
        "import sys, pathlib; from graphport.runtime.tokenizer import Tokenizer; "
        "import graphport.runtime.sampling, graphport.runtime.stop_strings; "
        "Tokenizer.load(pathlib.Path(sys.argv[1])); "
        "print([m for m in ('torch', 'onnx', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
