"""The command `serve`: bundles behind an OpenAI-compatible HTTP server.

In: bundles, by name or not, limits. Out: the server's address on stdout, a log of JSON lines on stderr. It serves
nothing itself; torch is never imported.
"""

import ipaddress
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graphport.cli_options import Debug, PrefillProducts
from graphport.model_def.signature import KIND_WORDS, MANIFEST_FILE

if TYPE_CHECKING:
    from graphport.runtime import Encoder, LanguageModel

Device = Literal["auto", "cpu", "cuda"]

_INSTALL = 'pip install "graphport[serve]"'
_MIB = 1 << 20

_log = logging.getLogger("graphport.serve")


def serve(
    bundles: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]BUNDLE...", help="Models to serve; the name is the folder's unless given."),
    ],
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is for this machine only.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    max_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences (of an encoder: texts) that run together (default: 8, 32).")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=0, help="Sequences of a model that may wait; more get 429.")] = 64,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt and answer in tokens (default: the bundle's).")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Longest body of a request, in bytes.")] = 4 << 20,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    read_timeout: Annotated[float, typer.Option(help="Seconds for a request's headers, and for its body.")] = 30.0,
    grace: Annotated[float, typer.Option(help="Seconds that what runs has to end after SIGTERM.")] = 30.0,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with one API key a line; without it nobody is asked for one.")
    ] = None,
    prefix_cache: Annotated[
        int, typer.Option(min=0, help="MiB for rows of earlier prompts, of each language model; 0 keeps none.")
    ] = 256,
    prompt_lookup: Annotated[
        bool, typer.Option("--prompt-lookup", help="Draft tokens from the text so far; for copies and edits.")
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the CPU (default: one a core).")] = None,
    device: Annotated[Device, typer.Option(help="Where to run.")] = "auto",
    prefill_products: PrefillProducts = None,
    debug: Debug = False,
) -> None:
    """Serve BUNDLEs over HTTP in OpenAI's form until told to end; then what runs is finished."""
    named = _named(bundles)
    try:
        from graphport.runtime import DualEncoder, ImageEncoder, RecurrentModel, load
        from graphport.runtime.server import Server, open_socket, raise_file_limit
        from graphport.runtime.server_log import log_as_json
        from graphport.runtime.server_settings import ServerSettings, read_api_keys
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    settings = ServerSettings(
        max_queue=max_queue,
        max_body_bytes=max_body,
        request_timeout=timeout,
        read_timeout=read_timeout,
        grace=grace,
        api_keys=() if api_key_file is None else read_api_keys(api_key_file),
    )
    log_as_json(debug=debug)
    encoders = {name for name, folder in named.items() if _is_encoder(folder, max_length)}  # all, before one is opened
    if prompt_lookup and len(encoders) == len(named):
        raise ValueError("--prompt-lookup drafts tokens, and none of the bundles generates any: leave it out")
    if prefill_products == "float32" and len(encoders) == len(named):
        raise ValueError("--prefill-products is for prompts, and none of the bundles generates: leave it out")
    opened: dict[str, LanguageModel | Encoder] = {}
    with open_socket(host, port) as listening:
        for name, folder in named.items():
            is_encoder = name in encoders
            model = load(
                folder,
                device=device,
                max_batch=max_batch,
                max_length=max_length,
                threads=threads,
                prefix_cache_bytes=0 if is_encoder else prefix_cache * _MIB,
                prompt_lookup=prompt_lookup and not is_encoder,
                prefill_products=None if is_encoder else prefill_products,
            )
            assert not isinstance(model, ImageEncoder | DualEncoder | RecurrentModel)  # as _is_encoder made sure
            opened[name] = model
        if not settings.api_keys and not _is_loopback(host):
            _log.warning("anybody who reaches %s can use the models: no --api-key-file was given", host)
        raise_file_limit()
        server = Server(opened, listening, settings)
        server.run(lambda: _announce(*server.address, opened))


def _announce(host: str, port: int, names: Iterable[str]) -> None:
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    _log.info("serving %s on %s", ", ".join(names), address)
    print(address, flush=True)


def _named(bundles: Sequence[str]) -> dict[str, Path]:
    """Folders by name: the text before `=`, unless a bundle lies at the whole path, else the folder's own."""
    named: dict[str, Path] = {}
    for text in bundles:
        before, equals, after = text.partition("=")
        is_named = bool(equals) and "/" not in before and not (Path(text) / MANIFEST_FILE).is_file()
        name, folder = (before, Path(after)) if is_named else (Path(text).resolve().name, Path(text))
        if not name or (is_named and not after):
            raise typer.BadParameter(f"{text!r} has an empty name or path; give NAME=BUNDLE or BUNDLE")
        if name in named:
            raise typer.BadParameter(f"two bundles have the name {name!r}; give NAME=BUNDLE")
        named[name] = folder
    return named


def _is_encoder(folder: Path, max_length: int | None) -> bool:
    """Whether texts are encoded and not continued.

    Raises ValueError for what has no route, and for a limit beyond the bundle's own.
    """
    from graphport.runtime import open_bundle
    from graphport.runtime.limits import checked_count

    manifest = open_bundle(folder).manifest
    kind = manifest.kind
    if kind not in ("decoder", "encoder"):
        raise ValueError(
            f"{folder} is {KIND_WORDS[kind]}, for which there is no route; serve decoders and encoders of texts"
        )
    if kind == "encoder" and manifest.config.pooling is None:
        config = manifest.config
        what = "has no pooling, so no vector a text"
        if config.classifier or config.masked_head:
            what = "is a classifier" if config.classifier else "has a masked head"
        raise ValueError(f"{folder} {what}, for which there is no route; serve decoders and encoders that embed texts")
    if max_length is not None:
        checked_count("--max-length", max_length, most=manifest.max_length, reason=f", the limit of {folder}")
    return kind == "encoder"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _missing(error: ModuleNotFoundError) -> Exception:
    if (error.name or "").split(".")[0] == "graphport":
        return error
    return RuntimeError(f"`graphport serve` needs {error.name}, which is not installed; do: {_INSTALL}")
