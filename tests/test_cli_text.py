"""`generate` and `chat`: what they stream, what they time, what they pass on. The runtime is a fake."""

import json
from pathlib import Path

import pytest
from cli_fakes import FakeRuntime, PipedInput

from graphport.cli import main


def test_generate_streams_to_stdout_and_times_on_stderr(
    fake_runtime: FakeRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "bundle", "Capital?"]) == 0
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert "14 prompt tokens, 2 new (stop), first token after 0." in err
    assert "tokens/s" in err
    assert fake_runtime.loads == [(Path("bundle"), {"device": "auto", "max_batch": 1, "prefill_products": None})]
    assert fake_runtime.prompts == ["<user>Capital?"]
    assert fake_runtime.sampling == [{"max_new_tokens": 256, "temperature": 0.0}]


def test_generate_passes_every_option_on(fake_runtime: FakeRuntime) -> None:
    how = ["--device", "cpu", "--prefill-products", "float32"]
    options = "--max-new-tokens 5 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 --seed 4"
    assert main(["generate", "b", "p", *options.split(), "--stop", "X", "--stop", "Y Z", *how]) == 0
    expected = {"max_new_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    expected |= {"repetition_penalty": 1.2, "seed": 4, "stop": ("X", "Y Z")}
    assert fake_runtime.sampling == [expected]
    assert fake_runtime.loads == [(Path("b"), {"device": "cpu", "max_batch": 1, "prefill_products": "float32"})]


def test_generate_json_prints_one_object_and_no_stream(
    fake_runtime: FakeRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "bundle", "é", "--raw", "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert data.pop("time_to_first_token_s") >= 0
    assert data.pop("tokens_per_s") > 0
    assert data == {
        "text": "Paris.",
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "prompt_tokens": 1,
        "new_tokens": 2,
    }
    assert err == ""


@pytest.mark.parametrize("arguments", [["generate", "bundle"], ["generate", "bundle", "-"]])
def test_generate_reads_stdin_without_the_last_newline(
    arguments: list[str], fake_runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", PipedInput("two\nlines\n\n"))
    assert main([*arguments, "--raw"]) == 0
    assert fake_runtime.prompts == ["two\nlines\n"]


@pytest.mark.parametrize(
    ("has_template", "flags", "prompt"),
    [(True, [], "<user>hi"), (True, ["--raw"], "hi"), (True, ["--chat"], "<user>hi"), (False, [], "hi")],
)
def test_generate_uses_the_chat_template_if_there_is_one(
    has_template: bool, flags: list[str], prompt: str, fake_runtime: FakeRuntime
) -> None:
    fake_runtime.tokenizer.has_chat_template = has_template
    assert main(["generate", "bundle", "hi", *flags]) == 0
    assert fake_runtime.prompts == [prompt]


@pytest.mark.parametrize("arguments", [["generate", "bundle", "hi", "--chat"], ["chat", "bundle"]])
def test_chat_without_a_template_is_refused(
    arguments: list[str], fake_runtime: FakeRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runtime.tokenizer.has_chat_template = False
    assert main(arguments) == 1
    assert "needs a chat template and this bundle has none; use" in capsys.readouterr().err


def test_chat_keeps_the_conversation_until_reset_and_ends_at_exit(
    fake_runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", PipedInput("one\n\ntwo\n/reset\n/restart\nthree\n/exit\nfour\n"))
    assert main(["chat", "bundle"]) == 0
    assert fake_runtime.prompts == ["<user>one", "<user>one<assistant>Paris.<user>two", "<user>three"]
    out, err = capsys.readouterr()
    assert out == "Paris.\n" * 3
    assert "unknown command /restart" in err
    assert "> " not in err


def test_chat_ends_at_the_end_of_input_and_prompts_on_a_terminal(
    fake_runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", PipedInput("one", terminal=True))
    assert main(["chat", "bundle"]) == 0
    assert fake_runtime.prompts == ["<user>one"]
    assert capsys.readouterr().err.count("> ") == 2


def test_chat_takes_a_refused_turn_back_and_exits_with_1(
    fake_runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runtime.failure = ValueError("the conversation has 9 tokens, the limit is 8")
    monkeypatch.setattr("sys.stdin", PipedInput("one\ntwo\n"))
    assert main(["chat", "bundle"]) == 1
    assert fake_runtime.prompts == ["<user>one", "<user>two"]
    assert "the limit is 8 (this turn was dropped" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["generate", "bundle", "hi"], ["chat", "bundle"]])
def test_text_without_a_tokenizer_is_refused(
    arguments: list[str], fake_runtime: FakeRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runtime.tokenizer = None
    assert main(arguments) == 1
    assert "text needs a tokenizer and this bundle has none; use" in capsys.readouterr().err
