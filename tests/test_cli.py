"""The command line: its frozen contract, exit statuses, streams, and what it may import.

Export and runtime are fakes here; `test_parity_*` runs the commands on real models.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer

from graphport.cli import app, main
from graphport.model_def.config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig, TransformerConfig
from graphport.model_def.signature import FileRecord, GenerationDefaults, Manifest, decoder_signature

# DESIGN, "Command line": the commands built so far. A change here is a change of the contract.
CONTRACT = {
    "export": "SOURCE OUT --context --debug --force --kv-cache --no-verify --precision --require-fused --seed --target",
    "generate": "BUNDLE PROMPT --chat --debug --device --json --max-new-tokens --min-p --raw --repetition-penalty "
    "--seed --stop --temperature --top-k --top-p",
    "chat": "BUNDLE --debug",
    "verify": "BUNDLE --against --debug --json",
    "report": "BUNDLE --debug --json",
}
LATER = {"bench", "diff", "embed", "eval", "plan", "serve", "tune"}


def _spelling(command: Any) -> str:
    arguments, options = [], []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            arguments.append((parameter.metavar or parameter.name).upper())
        else:
            options += [*parameter.opts, *parameter.secondary_opts]
    return " ".join(arguments + sorted(options))


def test_commands_and_options_are_those_of_the_contract() -> None:
    commands = typer.main.get_command(app).commands
    spelled = {name: _spelling(command) for name, command in commands.items() if name not in LATER}
    assert spelled == CONTRACT


@dataclass
class FakeEvent:
    text: str
    token_id: int | None
    finish_reason: str | None = None
    logprob: float | None = None


@dataclass
class FakeTokenizer:
    has_chat_template: bool = True

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))


@dataclass
class FakeRuntime:
    """Stands for `graphport.runtime`: records its calls and answers "Paris."."""

    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    loads: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    sampling: list[dict[str, Any]] = field(default_factory=list)
    failure: BaseException | None = None

    def load(self, bundle: Path, **options: Any) -> "FakeRuntime":
        self.loads.append((bundle, options))
        return self

    def SamplingParams(self, **given: Any) -> dict[str, Any]:  # noqa: N802 - the name of the real class
        if given.get("temperature", 0) < 0:
            raise ValueError(f"temperature ({given['temperature']}) must not be negative; 0 is greedy")
        return given

    def stream(self, ids: list[int], sampling: dict[str, Any]) -> Any:
        self.prompts.append("".join(map(chr, ids)))
        self.sampling.append(sampling)
        yield FakeEvent("Par", 7)
        if self.failure is not None:
            raise self.failure
        yield FakeEvent("is", 8)
        yield FakeEvent(".", None, "stop")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setitem(sys.modules, "graphport.runtime", fake)
    return fake


def _manifest() -> Manifest:
    attention = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=10)
    norm = NormConfig()
    block = BlockConfig(attention=attention, feed_forward=FeedForwardConfig(width=7), norm=norm)
    config = TransformerConfig(vocab_size=11, hidden_size=5, max_positions=13, blocks=(block, block), final_norm=norm)
    return Manifest(
        graphport_version="0.1.0",
        kind="decoder",
        target="cpu",
        precision="int8",
        max_length=13,
        config=config,
        signature=decoder_signature(config),
        generation=GenerationDefaults(),
        source={"format": "gguf", "name": "tiny"},
        files={"model.onnx": FileRecord(size=2_500_000, sha256="00")},
    )


CHECK = {"name": "int8 against fp32, KL", "measured": 0.004, "tolerance": 0.006, "passed": True}


@dataclass
class FakeExport:
    """Stands for `graphport.export` and `graphport.export.verify`."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    checks: list[Any] = field(default_factory=lambda: [types.SimpleNamespace(**CHECK)])
    __path__: tuple[str, ...] = ()

    def export(self, *arguments: Any, **options: Any) -> Any:
        self.calls.append((arguments, options))
        options["progress"]("tracing [30 layers]")
        return types.SimpleNamespace(
            path=arguments[1],
            manifest=_manifest(),
            fusions={"pack_qkv": 30},
            certificate=self.checks,
            notes=["context limited to 13"],
        )

    def verify(self, bundle: Path, *, against: str | None, progress: Any) -> list[Any]:
        progress("running the checks")
        self.calls.append(((bundle,), {"against": against}))
        return self.checks


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> FakeExport:
    fake = FakeExport()
    monkeypatch.setitem(sys.modules, "graphport.export", fake)
    monkeypatch.setitem(sys.modules, "graphport.export.verify", fake)
    return fake


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing command"),
        ("expotr a b", "No such command 'expotr'. Did you mean 'export'"),
        ("generate", "Missing argument 'BUNDLE'"),
        ("generate b --top_k 3", "No such option: --top_k"),
        ("generate b p --max-new-tokens -1", "--max-new-tokens"),
        ("generate b p --temperature warm", "--temperature"),
        ("generate b p --temperature -1", r"temperature \(-1.0\) must not be negative"),
        ("generate b p --device tpu", "'tpu' is not one of 'auto', 'cpu', 'cuda'"),
        ("export a b --precision int3", "'int3' is not one of 'fp32'"),
        ("export a b --context 0", "--context"),
        ("export a b --require-fused attention", "needs RULE=all or RULE=N"),
        ("export a b --require-fused attention=-1", "needs RULE=all or RULE=N"),
        ("export a b --require-fused attention=1 --require-fused attention=2", "names attention twice"),
    ],
)
def test_bad_arguments_exit_with_2_and_one_line(
    arguments: str, message: str, runtime: FakeRuntime, exporter: FakeExport, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("graphport: error: ")
    assert err.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(err)
    assert not runtime.loads
    assert not exporter.calls


def test_generate_streams_to_stdout_and_times_on_stderr(
    runtime: FakeRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "bundle", "Capital?"]) == 0
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert "14 prompt tokens, 2 new (stop), first token after 0." in err
    assert "tokens/s" in err
    assert runtime.loads == [(Path("bundle"), {"device": "auto", "max_batch": 1})]
    assert runtime.prompts == ["<user>Capital?"]
    assert runtime.sampling == [{"max_new_tokens": 256, "temperature": 0.0}]


def test_generate_passes_every_option_on(runtime: FakeRuntime) -> None:
    options = "--max-new-tokens 5 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 --seed 4"
    assert main(["generate", "b", "p", *options.split(), "--stop", "X", "--stop", "Y Z", "--device", "cpu"]) == 0
    expected = {"max_new_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    expected |= {"repetition_penalty": 1.2, "seed": 4, "stop": ("X", "Y Z")}
    assert runtime.sampling == [expected]
    assert runtime.loads[0][1]["device"] == "cpu"


def test_generate_json_prints_one_object_and_no_stream(
    runtime: FakeRuntime, capsys: pytest.CaptureFixture[str]
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
    arguments: list[str], runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", _Stdin("two\nlines\n\n"))
    assert main([*arguments, "--raw"]) == 0
    assert runtime.prompts == ["two\nlines\n"]


@pytest.mark.parametrize(
    ("has_template", "flags", "prompt"),
    [(True, [], "<user>hi"), (True, ["--raw"], "hi"), (True, ["--chat"], "<user>hi"), (False, [], "hi")],
)
def test_generate_uses_the_chat_template_if_there_is_one(
    has_template: bool, flags: list[str], prompt: str, runtime: FakeRuntime
) -> None:
    runtime.tokenizer.has_chat_template = has_template
    assert main(["generate", "bundle", "hi", *flags]) == 0
    assert runtime.prompts == [prompt]


@pytest.mark.parametrize("arguments", [["generate", "bundle", "hi", "--chat"], ["chat", "bundle"]])
def test_chat_without_a_template_is_refused(
    arguments: list[str], runtime: FakeRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime.tokenizer.has_chat_template = False
    assert main(arguments) == 1
    assert "needs a chat template and this bundle has none; use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (ValueError("prompt of 9 tokens,\n  limit 8"), "graphport: error: prompt of 9 tokens, limit 8\n"),
        (KeyError("x"), "graphport: error: KeyError: 'x'; run again with --debug for the traceback\n"),
    ],
)
def test_failures_are_one_line_and_a_traceback_only_with_debug(
    failure: Exception, line: str, runtime: FakeRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime.failure = failure
    assert main(["generate", "bundle", "hi"]) == 1
    assert capsys.readouterr().err == line
    assert main(["generate", "bundle", "hi", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith(line)


@pytest.mark.parametrize("command", [["generate", "bundle", "hi"], ["chat", "bundle"]])
def test_an_interrupt_exits_with_130_and_no_traceback(
    command: list[str],
    runtime: FakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runtime.failure = KeyboardInterrupt()
    monkeypatch.setattr("sys.stdin", _Stdin("hi\n"))
    assert main(command) == 130
    assert "Traceback" not in capsys.readouterr().err


class _Stdin:
    """Piped standard input; `.isatty` is a terminal's when told so."""

    def __init__(self, text: str, *, terminal: bool = False) -> None:
        self._lines = text.splitlines(keepends=True)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def read(self) -> str:
        return "".join(self._lines)

    def readline(self) -> str:
        return self._lines.pop(0) if self._lines else ""


def test_chat_keeps_the_conversation_until_reset_and_ends_at_exit(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", _Stdin("one\n\ntwo\n/reset\n/restart\nthree\n/exit\nfour\n"))
    assert main(["chat", "bundle"]) == 0
    assert runtime.prompts == ["<user>one", "<user>one<assistant>Paris.<user>two", "<user>three"]
    out, err = capsys.readouterr()
    assert out == "Paris.\n" * 3
    assert "unknown command /restart" in err
    assert "> " not in err


def test_chat_ends_at_the_end_of_input_and_prompts_on_a_terminal(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", _Stdin("one", terminal=True))
    assert main(["chat", "bundle"]) == 0
    assert runtime.prompts == ["<user>one"]
    assert capsys.readouterr().err.count("> ") == 2


def test_chat_takes_a_refused_turn_back_and_exits_with_1(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime.failure = ValueError("the conversation has 9 tokens, the limit is 8")
    monkeypatch.setattr("sys.stdin", _Stdin("one\ntwo\n"))
    assert main(["chat", "bundle"]) == 1
    assert runtime.prompts == ["<user>one", "<user>two"]
    assert "the limit is 8 (this turn was dropped" in capsys.readouterr().err


def test_export_prints_the_path_on_stdout_and_tables_on_stderr(
    exporter: FakeExport, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "model.gguf", "build/out"]) == 0
    out, err = capsys.readouterr()
    assert out == "build/out\n"
    for piece in ("tracing [30 layers]", "2.5 MB", "pack_qkv", "30", "0.004", "0.006", "ok", "context limited"):
        assert piece in err
    assert "next: graphport generate build/out " in err
    (arguments, options), *_ = exporter.calls
    del options["progress"]
    assert arguments == ("model.gguf", Path("build/out"))
    assert options == {
        "target": "cpu",
        "precision": "int8",
        "kv_cache": "auto",
        "context": None,
        "seed": 0,
        "verify": True,
        "require_fused": {},
        "force": False,
    }


def test_export_passes_every_option_on(exporter: FakeExport) -> None:
    options = "--target cuda --precision fp16 --kv-cache int8 --context 64 --seed 3 --no-verify --force"
    fused = ["--require-fused", "attention=all", "--require-fused", "pack_qkv=30"]
    assert main(["export", "m", "o", *options.split(), *fused]) == 0
    passed = exporter.calls[0][1]
    del passed["progress"]
    assert passed == {
        "target": "cuda",
        "precision": "fp16",
        "kv_cache": "int8",
        "context": 64,
        "seed": 3,
        "verify": False,
        "require_fused": {"attention": "all", "pack_qkv": 30},
        "force": True,
    }


@pytest.mark.parametrize("command", [["export", "a", "b"], ["verify", "b"]])
def test_a_missing_optional_dependency_is_named_with_the_install_command(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Blocked:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.startswith("graphport.export"):
                raise ModuleNotFoundError("No module named 'torch'", name="torch")

    for name in [name for name in sys.modules if name.startswith("graphport.export")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.meta_path", [Blocked(), *sys.meta_path])
    assert main(command) == 1
    assert "needs torch, which is not installed; do: pip install 'graphport[export]'" in capsys.readouterr().err


def test_verify_exits_with_1_when_a_check_fails(exporter: FakeExport, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "bundle", "--against", "model.gguf"]) == 0
    assert capsys.readouterr().out == "passed\n"
    assert exporter.calls == [((Path("bundle"),), {"against": "model.gguf"})]
    exporter.checks.append(types.SimpleNamespace(**CHECK | {"passed": False, "measured": 0.5}))
    assert main(["verify", "bundle"]) == 1
    out, err = capsys.readouterr()
    assert out == "failed\n"
    assert "FAILED" in err
    assert main(["verify", "bundle", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["passed"], data["checks"][0]) == (False, CHECK)


def test_verify_without_any_check_has_not_passed(exporter: FakeExport) -> None:
    exporter.checks.clear()
    assert main(["verify", "bundle"]) == 1


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "manifest.json").write_text(_manifest().to_json())
    (tmp_path / "fusions.json").write_text(json.dumps({"counts": {"pack_qkv": 2}}))
    (tmp_path / "certificate.json").write_text(json.dumps({"checks": [CHECK | {"stage": "quantised"}]}))
    return tmp_path


def test_report_shows_manifest_files_fusions_and_certificate(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(bundle)]) == 0
    err = capsys.readouterr().err
    for piece in ("int8", "13 tokens", "tiny", "model.onnx", "2.5 MB", "pack_qkv", "int8 against fp32, KL"):
        assert piece in err
    assert main(["report", str(bundle), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["manifest"]["precision"] == "int8"
    assert data["fusions"] == {"pack_qkv": 2}
    assert data["checks"] == [CHECK]


def test_report_says_when_there_is_no_certificate(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "certificate.json").unlink()
    assert main(["report", str(bundle)]) == 0
    assert "no certificate" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"checks": [{"name": "x"}]}'])
def test_report_refuses_a_damaged_certificate(text: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bundle / "certificate.json").write_text(text)
    assert main(["report", str(bundle)]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_report_refuses_a_folder_that_is_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "is no graphport bundle" in capsys.readouterr().err


# A process of its own with a runtime that streams for ever.
_ENDLESS = textwrap.dedent("""
    import itertools, sys, types
    class Model:
        tokenizer = types.SimpleNamespace(has_chat_template=False, encode=lambda text: [1])
        def stream(self, ids, sampling):
            for i in itertools.count():
                yield types.SimpleNamespace(text="line\\n", token_id=i, finish_reason=None)
    sys.modules["graphport.runtime"] = types.SimpleNamespace(
        load=lambda bundle, **options: Model(), SamplingParams=lambda **given: given)
    from graphport.cli import main
    sys.exit(main(["generate", "bundle", "hi"]))
""")


def _start(script: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def test_a_closed_stdout_ends_without_a_traceback() -> None:
    process = _start(_ENDLESS)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "line\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=20) == 1


def test_a_stdout_closed_before_the_last_flush_ends_without_a_traceback(bundle: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "graphport.cli", "report", str(bundle), "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False, timeout=20)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_sigint_ends_a_stream_with_130() -> None:
    process = _start(_ENDLESS)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err


_HEAVY = ("torch", "onnx", "onnx_ir", "onnxscript", "transformers", "safetensors", "gguf")


def _run_and_list_imports(arguments: list[str], names: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    script = f"import sys; from graphport.cli import main; code = main({arguments!r}); "
    script += f"print(code, [name for name in {names!r} if name in sys.modules])"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)


@pytest.mark.parametrize("command", ["generate", "chat", "report"])
def test_generate_chat_and_report_start_without_torch(command: str, tmp_path: Path) -> None:
    done = _run_and_list_imports([command, str(tmp_path)], _HEAVY)
    assert done.stdout == "1 []\n"
    assert f"{tmp_path} is no graphport bundle" in done.stderr


def test_help_imports_neither_torch_nor_the_runtime() -> None:
    done = _run_and_list_imports(["generate", "--help"], (*_HEAVY, "numpy", "onnxruntime"))
    assert done.stdout.endswith("0 []\n")
    assert "greedy" in done.stdout
