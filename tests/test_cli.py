"""The command line as a whole: its frozen contract, bad arguments, failures, interrupts, closed pipes, imports.

Export and runtime are fakes here (`cli_fakes.py`).
"""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_fakes import FakeExport, FakeRuntime, PipedInput

from graphport.cli import app, main
from graphport.runtime.memory import NotEnoughMemoryError
from graphport.runtime.sampling import NonFiniteLogitsError

# The commands built so far, with all their options. A change here breaks the scripts that call them.
CONTRACT = {
    "export": "SOURCE OUT --accuracy-level --calibration --context --debug --disable-pass --force --image-size "
    "--kv-cache --layout --max-kl --no-prepare --no-verify --precision --require-exact --require-fused --seed "
    "--target",
    "generate": "BUNDLE PROMPT --chat --debug --device --json --language --length-penalty --max-new-tokens --min-p "
    "--num-beams --prefill-products --raw --repetition-penalty --seed --source-language --stop --temperature --top-k "
    "--top-p",
    "chat": "BUNDLE --debug",
    "transcribe": "BUNDLE FILE --debug --device --json --language --max-new-tokens --no-timestamps --num-beams --task "
    "--timestamps",
    "prepare": "BUNDLE --debug",
    "tune": "BUNDLE --against --debug --drop-slow-fusions --json --max-seconds --new-tokens --prompt-tokens",
    "verify": "BUNDLE --against --debug --device --invariance --json --write",
    "diff": "A B --debug --json --steps --tokens --tolerance",
    "report": "BUNDLE --debug --html --json --times",
    "eval": "BUNDLE TEXTFILE --against --context --debug --json --prefill-products --stride",
    "bench": "BUNDLE --batch --debug --json --new-tokens --prefill-products --prompt-lengths",
    "plan": "SOURCE|BUNDLE --batch --context --debug --json --kv-cache --precision --prefill-chunk --prefill-products "
    "--target",
    "embed": "BUNDLE TEXT... --batch-size --debug --device --file --json --no-normalize --normalize --truncate",
    "serve": "[NAME=]BUNDLE... --api-key-file --debug --device --grace --host --max-batch --max-body "
    "--max-length --max-queue --port --prefill-products --prefix-cache --prompt-lookup --read-timeout --threads "
    "--timeout",
}


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
    spelled = {name: _spelling(command) for name, command in commands.items()}
    assert spelled == CONTRACT


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
    arguments: str, message: str, fake_runtime: FakeRuntime, fake_export: FakeExport, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("graphport: error: ")
    assert err.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(err)
    assert not fake_runtime.loads
    assert not fake_export.calls


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (ValueError("prompt of 9 tokens,\n  limit 8"), "graphport: error: prompt of 9 tokens, limit 8\n"),
        (NotEnoughMemoryError("a KV cache needs 9 MiB"), "graphport: error: a KV cache needs 9 MiB\n"),
        (NonFiniteLogitsError("the logits are not finite"), "graphport: error: the logits are not finite\n"),
        (KeyError("x"), "graphport: error: KeyError: 'x'; run again with --debug for the traceback\n"),
    ],
)
def test_failures_are_one_line_and_a_traceback_only_with_debug(
    failure: Exception, line: str, fake_runtime: FakeRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_runtime.failure = failure
    assert main(["generate", "bundle", "hi"]) == 1
    assert capsys.readouterr().err == line
    assert main(["generate", "bundle", "hi", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith(line)


@pytest.mark.parametrize("command", [["generate", "bundle", "hi"], ["chat", "bundle"]])
def test_an_interrupt_exits_with_130_and_no_traceback(
    command: list[str],
    fake_runtime: FakeRuntime,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_runtime.failure = KeyboardInterrupt()
    monkeypatch.setattr("sys.stdin", PipedInput("hi\n"))
    assert main(command) == 130
    assert "Traceback" not in capsys.readouterr().err


# A process of its own with a runtime that streams for ever.
_ENDLESS = textwrap.dedent("""
    import itertools, sys, types
    class Model:
        manifest = types.SimpleNamespace(kind="decoder")
        tokenizer = types.SimpleNamespace(has_chat_template=False, encode=lambda text: [1])
        def stream(self, ids, sampling):
            for i in itertools.count():
                yield types.SimpleNamespace(text="line\\n", token_id=i, finish_reason=None)
    sys.modules["graphport.runtime"] = types.SimpleNamespace(
        load_language_model=lambda bundle, **options: Model(), SamplingParams=lambda **given: given)
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


def test_a_stdout_closed_before_the_last_flush_ends_without_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "graphport.cli", "--version"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False, timeout=20)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_closed_from_the_start_is_an_empty_one(closed: str) -> None:
    script = textwrap.dedent("""
        import sys, types
        class Model:
            manifest = types.SimpleNamespace(kind="decoder")
            tokenizer = types.SimpleNamespace(has_chat_template=False, encode=lambda text: [len(text)])
            def stream(self, ids, sampling):
                yield types.SimpleNamespace(text=str(ids), token_id=1, finish_reason="stop")
        sys.modules["graphport.runtime"] = types.SimpleNamespace(
            load_language_model=lambda bundle, **options: Model(), SamplingParams=lambda **given: given)
        from graphport.cli import main
        sys.exit(main(["generate", "bundle", *(["hi"] if sys.stdin else [])]))
    """)
    command = ["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, script]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=20)
    assert "error" not in done.stderr
    assert done.returncode == 0
    if closed == "<&-":
        assert done.stdout == "[0]\n"


def test_sigterm_unwinds_a_command_so_that_it_cleans_up() -> None:
    tidy = 'import atexit; atexit.register(lambda: print("unwound", file=sys.stderr))'
    process = _start(_ENDLESS.replace("import itertools, sys, types", f"import itertools, sys, types\n{tidy}"))
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (143, "unwound\n")


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
