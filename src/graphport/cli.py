"""The command line: `graphport COMMAND ...`, one function a command.

In: arguments. Out: results on stdout, progress and tables on stderr, exit status 0 done, 1 refused or failed, 2 bad
arguments, 130 interrupted, 143 told to end. It computes nothing itself.

What a command needs is imported inside its function: `generate` and `chat` must start without torch, `--help` without
anything, and `export` must be able to say which optional dependency is missing.
"""

import contextlib
import json
import logging
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import graphport
from graphport import cli_tables
from graphport.cli_answers import answer, chat_turns, prompt_ids, timing_line
from graphport.model_def.signature import TOKENIZER_FILE

if TYPE_CHECKING:
    from graphport.runtime import SamplingParams

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Ship a PyTorch transformer on ONNX Runtime, with proof that it is still the same model.",
)

Device = Literal["auto", "cpu", "cuda"]
Target = Literal["cpu", "cuda"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "gguf"]
CacheType = Literal["auto", "fp32", "fp16", "bf16", "int8", "int4"]

_INSTALL_EXPORT = "pip install 'graphport[export]'"
_CHAT_NEW_TOKENS = 512
_BENCH_LENGTHS = (32, 512, 2048)


@dataclass(slots=True)
class _Invocation:
    """What one call of `main` has to remember when a command fails."""

    debug: bool = False


def _set_debug(context: typer.Context, value: bool) -> None:
    if value:
        context.find_root().obj.debug = True
        logging.getLogger("graphport").setLevel(logging.DEBUG)


def _show_version(value: bool) -> None:
    if value:
        print(f"graphport {graphport.__version__}")
        raise typer.Exit


Debug = Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Show tracebacks and debug messages.")]
BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder that `graphport export` wrote.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.callback()
def _root(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def export(
    source: Annotated[
        str, typer.Argument(help="Hugging Face folder or hub id, .gguf file, or path/to/file.py:function.")
    ],
    out: Annotated[Path, typer.Argument(help="Bundle folder to write; must not exist, unless --force.")],
    *,
    target: Annotated[Target, typer.Option(help="Where the bundle will run.")] = "cpu",
    precision: Annotated[Precision, typer.Option(help="Weights and activations; gguf is not built yet.")] = "int8",
    kv_cache: Annotated[CacheType, typer.Option(help="Element type of the KV cache.")] = "auto",
    context: Annotated[int | None, typer.Option(min=1, help="Longest prompt + answer, in tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the inputs used to verify.")] = 0,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Write no certificate.")] = False,
    require_fused: Annotated[
        list[str] | None, typer.Option(metavar="RULE=all|N", help="Fail unless RULE matched everywhere, or N times.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing OUT.")] = False,
    _debug: Debug = False,
) -> None:
    """Export SOURCE to the bundle OUT: fuse, lower, quantise, and compare with eager PyTorch."""
    required = _required_fusions(require_fused or [])
    try:
        from graphport.export import export as run_export
    except ModuleNotFoundError as error:
        raise _missing("export", error) from error
    with cli_tables.progress_lines() as progress:
        bundle = run_export(
            source,
            out,
            target=target,
            precision=precision,
            kv_cache=kv_cache,
            context=context,
            seed=seed,
            verify=not no_verify,
            require_fused=required,
            force=force,
            progress=progress,
        )
    cli_tables.print_bundle(bundle.manifest, bundle.fusions, [cli_tables.check_row(c) for c in bundle.certificate])
    cli_tables.print_notes(bundle.notes)
    print(bundle.path)
    if TOKENIZER_FILE in bundle.manifest.files:
        question = '"What is the capital of France?"'
        cli_tables.print_line(f"next: graphport generate {shlex.quote(str(bundle.path))} {question}")
    else:
        cli_tables.print_line(
            f"next: graphport report {shlex.quote(str(bundle.path))} (without a tokenizer it takes ids)"
        )


@app.command()
def generate(
    bundle: BundlePath,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to answer; stdin when absent or '-'.")
    ] = None,
    *,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time (greedy).")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the K likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest tokens of total mass P.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below P times the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages repeats.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before TEXT; may be repeated.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Use the chat template (default: if the bundle has one).")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to run.")] = "auto",
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Answer PROMPT: the text streams to stdout, its timing follows on stderr."""
    text = _read_prompt() if prompt in (None, "-") else str(prompt)
    optional: dict[str, float | Sequence[str] | None] = {
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
    }
    sampling = _sampling(max_new_tokens, temperature=temperature, **optional)
    from graphport.runtime import load

    lm = load(bundle, device=device, max_batch=1)
    result = answer(lm, prompt_ids(lm, text, chat=chat), sampling, write=None if as_json else _write)
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    _write("\n")
    cli_tables.print_line(timing_line(result))


@app.command()
def chat(bundle: BundlePath, *, _debug: Debug = False) -> None:
    """Talk with the model, greedily (temperature 0), one line a turn; /reset starts again, /exit ends."""
    sampling = _sampling(_CHAT_NEW_TOKENS, temperature=0.0)
    from graphport.runtime import load

    lm = load(bundle, max_batch=1)
    failed = chat_turns(lm, sampling, lines=iter(_read_line, None), write=_write, note=cli_tables.print_line)
    if failed:
        raise typer.Exit(1)


@app.command()
def verify(
    bundle: BundlePath,
    *,
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Also compare with eager PyTorch on SOURCE.")
    ] = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Re-run the bundle's certificate on this machine; exit status 1 when a check fails."""
    try:
        from graphport.export.verify import verify as run_verify
    except ModuleNotFoundError as error:
        raise _missing("verify", error) from error
    with cli_tables.progress_lines() as progress:
        rows = [cli_tables.check_row(check) for check in run_verify(bundle, against=against, progress=progress)]
    passed = bool(rows) and all(row.passed for row in rows)
    if as_json:
        print(json.dumps({"passed": passed, "checks": [row.to_dict() for row in rows]}))
    else:
        cli_tables.print_checks(rows)
        print("passed" if passed else "failed")
    if not passed:
        raise typer.Exit(1)


@app.command()
def report(bundle: BundlePath, *, as_json: Json = False, _debug: Debug = False) -> None:
    """Show what a bundle is: manifest, files, what fused, certificate."""
    facts = cli_tables.read_report(bundle)
    if as_json:
        print(json.dumps(facts.to_dict(), ensure_ascii=False))
    else:
        cli_tables.print_report(facts)


@app.command()
def bench(
    bundle: BundlePath,
    *,
    prompt_lengths: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Prompt tokens a row (default: those of 32,512,2048 that fit)."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate a row.")] = 32,
    batch: Annotated[str, typer.Option(metavar="N,N,...", help="Rows at once.")] = "1",
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Time prefill and decode of BUNDLE on random prompts on this machine: medians of 3."""
    lengths = None if prompt_lengths is None else _numbers("--prompt-lengths", prompt_lengths)
    batches = _numbers("--batch", batch)
    from graphport.runtime import load
    from graphport.runtime.benchmark import check_fits, measure_speed

    lm = load(bundle, max_batch=max(batches))
    longest = lm.max_length - new_tokens
    if lengths is None:
        lengths = [length for length in _BENCH_LENGTHS if length <= longest] or [max(longest, 1)]
    for length in lengths:
        check_fits(lm, prompt_length=length, new_tokens=new_tokens)
    rows = []
    with cli_tables.progress_lines() as progress:
        for rows_at_once in batches:
            for length in lengths:
                progress(f"prompts of {length} tokens, batch {rows_at_once}")
                row = measure_speed(lm, prompt_length=length, batch=rows_at_once, new_tokens=new_tokens)
                rows.append(asdict(row))
    if as_json:
        print(json.dumps({"bundle": str(bundle), "threads": lm.threads, "rows": rows}))
    else:
        cli_tables.print_speeds(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's); returns the exit status."""
    invocation = _Invocation()
    _open_closed_streams()
    logging.basicConfig(format="graphport: %(message)s", stream=sys.stderr)
    logging.getLogger("graphport").setLevel(logging.INFO)
    try:
        command = typer.main.get_command(app)
        with _cleaning_up_at(signal.SIGTERM):
            status = command.main(arguments, prog_name="graphport", standalone_mode=False, obj=invocation)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader left (`| head -1`). Point stdout at nothing, or the interpreter's last flush fails as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # the last place that can turn a failure into one line
        return _failed(error, invocation)
    return int(status or 0)


def _open_closed_streams() -> None:
    """Give a process that was started with a standard stream closed (`<&-`, `>&-`) an empty one in its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - open to the end


@contextlib.contextmanager
def _cleaning_up_at(number: signal.Signals) -> Iterator[None]:
    """Let signal `number` (of `kill`, a service manager, a container's end) unwind the command, as Ctrl-C does.

    The process ends with status 128 + number, and half-written folders are removed first. Only the main thread may set
    a handler; elsewhere the signal keeps its meaning.
    """

    def end(_: int, __: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, end)
    try:
        yield
    finally:
        signal.signal(number, before)


def _failed(error: Exception, invocation: _Invocation) -> int:
    if invocation.debug:
        traceback.print_exception(error)
    print(f"graphport: error: {' '.join(_message(error).split())}", file=sys.stderr)
    return error.exit_code if isinstance(error, typer.TyperException) else 1


def _message(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        return f"{error.format_message().rstrip('.')}; see `graphport --help` or `graphport COMMAND --help`"
    if isinstance(error, ValueError | OSError | NotImplementedError | RuntimeError | MemoryError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}; run again with --debug for the traceback"


def _missing(command: str, error: ModuleNotFoundError) -> Exception:
    """The error to raise when `command` cannot import what it needs; ours is a bug and stays as it is."""
    if (error.name or "").split(".")[0] == "graphport":
        return error
    return RuntimeError(f"`graphport {command}` needs {error.name}, which is not installed; do: {_INSTALL_EXPORT}")


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option} needs whole numbers above 0 separated by commas, got {text!r}")
    return [int(part) for part in parts]


def _required_fusions(values: list[str]) -> dict[str, int | Literal["all"]]:
    required: dict[str, int | Literal["all"]] = {}
    for value in values:
        rule, _, count = value.partition("=")
        if not rule or not (count == "all" or (count.isascii() and count.isdigit())):
            raise typer.BadParameter(f"--require-fused {value!r}: needs RULE=all or RULE=N, for example attention=30")
        if rule in required:
            raise typer.BadParameter(f"--require-fused names {rule} twice; give each rule once")
        required[rule] = "all" if count == "all" else int(count)
    return required


def _sampling(max_new_tokens: int, *, temperature: float, **optional: float | Sequence[str] | None) -> "SamplingParams":
    """Sampling parameters; what was not given keeps the library's default, and a bad value is a bad argument."""
    from graphport.runtime import SamplingParams

    given: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
    try:
        return SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, **given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _read_prompt() -> str:
    """All of stdin, without the one newline that `echo` adds."""
    return sys.stdin.read().removesuffix("\n")


def _read_line() -> str | None:
    """The next line of stdin without its newline, None at its end; on a terminal after a prompt sign."""
    if sys.stdin.isatty():
        cli_tables.print_line("> ", end="")
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
