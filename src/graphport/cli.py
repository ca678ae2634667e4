"""The command line: `graphport COMMAND ...`; the commands stand in `cli_export.py`, `cli_run.py`, ... .

In: arguments. Out: results on stdout, progress and tables on stderr, exit status 0 done, 1 refused or failed, 2 bad
arguments, 130 interrupted, 143 told to end. It computes nothing itself.

What a command needs is imported inside its function: `generate`, `chat` and `serve` must start without torch, `--help`
without anything, and `export` must be able to say which optional dependency is missing.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

import graphport
from graphport.cli_diff import diff
from graphport.cli_embed import embed
from graphport.cli_eval import evaluate
from graphport.cli_export import export, report
from graphport.cli_options import Invocation
from graphport.cli_plan import plan
from graphport.cli_prepare import prepare
from graphport.cli_run import bench, chat, generate
from graphport.cli_serve import serve
from graphport.cli_transcribe import transcribe
from graphport.cli_tune import tune
from graphport.cli_verify import verify

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Ship a PyTorch transformer on ONNX Runtime, with proof that it is still the same model.",
)
_COMMANDS: dict[str, Callable[..., None]] = {  # in the order of `--help`
    "export": export,
    "generate": generate,
    "chat": chat,
    "transcribe": transcribe,
    "prepare": prepare,
    "tune": tune,
    "verify": verify,
    "diff": diff,
    "report": report,
    "eval": evaluate,
    "bench": bench,
    "plan": plan,
    "embed": embed,
    "serve": serve,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)

# errors whose text says what was got, what is needed and what to do
_EXPLAINED = (ValueError, OSError, NotImplementedError, RuntimeError, MemoryError, FloatingPointError)


def _show_version(value: bool) -> None:
    if value:
        print(f"graphport {graphport.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's); returns the exit status."""
    invocation = Invocation()
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


def _failed(error: Exception, invocation: Invocation) -> int:
    if invocation.debug:
        traceback.print_exception(error)
    print(f"graphport: error: {' '.join(_message(error).split())}", file=sys.stderr)
    return error.exit_code if isinstance(error, typer.TyperException) else 1


def _message(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        return f"{error.format_message().rstrip('.')}; see `graphport --help` or `graphport COMMAND --help`"
    if isinstance(error, _EXPLAINED) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}; run again with --debug for the traceback"


if __name__ == "__main__":
    sys.exit(main())
