"""The commands that run a bundle: `generate`, `chat`, `bench`.

In: arguments, stdin. Out: text and tables on stdout, timing and progress on stderr. The runtime is imported when a
command runs; torch is never.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from graphport import cli_tables
from graphport.cli_answers import answer, chat_turns, hears, prompt_of, search, timing_line
from graphport.cli_options import BundlePath, Debug, Json, PrefillProducts

if TYPE_CHECKING:
    from graphport.runtime import SamplingParams
    from graphport.runtime.request_options import RequestArguments

Device = Literal["auto", "cpu", "cuda"]

_CHAT_NEW_TOKENS = 512
_CHAT_PREFIX_BYTES = 256 << 20  # rows of the conversation, which every turn repeats
_BENCH_LENGTHS = (32, 512, 2048)


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
    num_beams: Annotated[int | None, typer.Option(help="Beam search with N beams, above 1.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="Of beam search: above 0 favours long texts.")] = None,
    language: Annotated[str | None, typer.Option(metavar="CODE", help="Language to translate to.")] = None,
    source_language: Annotated[str | None, typer.Option(metavar="CODE", help="Language of PROMPT.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Use the chat template (default: if the bundle has one).")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to run.")] = "auto",
    prefill_products: PrefillProducts = None,
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
        "num_beams": num_beams,
        "length_penalty": length_penalty,
    }
    sampling = _sampling(max_new_tokens, temperature=temperature, **optional)
    from graphport.runtime import load_language_model

    options: RequestArguments = {}
    if language is not None:
        options["language"] = language
    if source_language is not None:
        options["source_language"] = source_language
    beams = 1 if num_beams is None else num_beams
    lm = load_language_model(bundle, device=device, max_batch=beams, prefill_products=prefill_products)
    asked = prompt_of(lm, text, chat=chat)
    choose = search if beams > 1 else answer
    result = choose(lm, asked, sampling, write=None if as_json else _write, options=options)
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
        return
    _write("\n")
    cli_tables.print_line(timing_line(result))


def chat(bundle: BundlePath, *, _debug: Debug = False) -> None:
    """Talk with the model, greedily (temperature 0), one line a turn; /reset starts again, /exit ends."""
    sampling = _sampling(_CHAT_NEW_TOKENS, temperature=0.0)
    from graphport.runtime import load_language_model, open_bundle

    if open_bundle(bundle).manifest.kind == "encoder_decoder":
        raise ValueError(f"{bundle} is an encoder-decoder, and chat is for decoders; use `graphport generate`")
    lm = load_language_model(bundle, max_batch=1, prefix_cache_bytes=_CHAT_PREFIX_BYTES)
    failed = chat_turns(lm, sampling, lines=iter(_read_line, None), write=_write, note=cli_tables.print_line)
    if failed:
        raise typer.Exit(1)


def bench(
    bundle: BundlePath,
    *,
    prompt_lengths: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Prompt tokens a row (default: those of 32,512,2048 that fit)."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate a row.")] = 32,
    batch: Annotated[str, typer.Option(metavar="N,N,...", help="Rows at once.")] = "1",
    prefill_products: PrefillProducts = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Time prefill and decode of BUNDLE on random prompts on this machine: medians of 3."""
    lengths = None if prompt_lengths is None else _numbers("--prompt-lengths", prompt_lengths)
    batches = _numbers("--batch", batch)
    from graphport.runtime import load_language_model
    from graphport.runtime.benchmark import check_fits, measure_speed

    lm = load_language_model(bundle, max_batch=max(batches), prefill_products=prefill_products)
    if hears(lm):
        raise ValueError(f"bench gives random ids, and {bundle} hears; time `graphport transcribe` on a recording")
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
        prefill = {"prefill_products": lm.prefill_products, "prefill_chunk": lm.prefill_chunk}
        print(json.dumps({"bundle": str(bundle), "threads": lm.threads, **prefill, "rows": rows}))
        return
    cli_tables.print_speeds(rows)
    products = "float32 products" if lm.prefill_products == "float32" else "products as exported"
    cli_tables.print_line(f"threads: {lm.threads}; prompts in steps of {lm.prefill_chunk} tokens, {products}")


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option} needs whole numbers above 0 separated by commas, got {text!r}")
    return [int(part) for part in parts]


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
