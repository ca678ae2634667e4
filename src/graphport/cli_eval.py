"""The command that judges a bundle by a text: `eval`.

In: a bundle, a text, and a reference or none. Out: figures on stdout, progress on stderr. The runtime is imported when
the command runs; torch only when the reference is a source.
"""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphport import cli_tables
from graphport.cli_options import BundlePath, Debug, Json, PrefillProducts, missing_dependency
from graphport.model_def.signature import MANIFEST_FILE
from graphport.model_def.text_file import read_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphport.runtime.evaluate import Evaluation, ScoringModel
    from graphport.runtime.tokenizer import Tokenizer


def evaluate(
    bundle: BundlePath,
    textfile: Annotated[
        Path, typer.Argument(metavar="TEXTFILE", help="UTF-8 text; a JSON list of ids for a bundle without tokenizer.")
    ],
    *,
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE|BUNDLE", help="Also compare with eager PyTorch, or another bundle.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens a window (default: what the models hold, up to 2048).")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from one window to the next (default: no overlap).")
    ] = None,
    prefill_products: PrefillProducts = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Measure BUNDLE on a text: perplexity, and with --against KL divergence and top-1 agreement."""
    if context is not None and stride is not None and stride > context:
        raise typer.BadParameter(f"--stride {stride} would skip text: it must be at most --context, {context}")
    begin = time.perf_counter()
    sizes = {"context": context, "stride": stride}
    result, products = _evaluated(bundle, textfile, against=against, prefill_products=prefill_products, sizes=sizes)
    seconds = time.perf_counter() - begin
    if as_json:
        names = {"bundle": str(bundle), "textfile": str(textfile), "against": against, "prefill_products": products}
        print(json.dumps({**names, **result.to_dict(), "seconds": seconds}, ensure_ascii=False))
        return
    cli_tables.print_evaluation(result, name=str(bundle), against=against)
    how = "; long steps with float32 products" if products == "float32" else ""
    cli_tables.print_line(_coverage(result) + f"; {seconds:.1f} s{how}")


def _evaluated(
    bundle: Path,
    textfile: Path,
    *,
    against: str | None,
    prefill_products: PrefillProducts,
    sizes: "Mapping[str, int | None]",
) -> "tuple[Evaluation, str]":
    """The figures, and the products that long steps had."""
    from graphport.runtime import load_language_model
    from graphport.runtime.evaluate import evaluate as run
    from graphport.runtime.evaluation_text import evaluation_text, require_same_tokens

    content = read_text(textfile, argument="TEXTFILE")
    with cli_tables.progress_lines() as progress:
        progress("opening the bundle")
        lm = load_language_model(bundle, max_batch=1, prefill_products=prefill_products)
        text = evaluation_text(content, lm.tokenizer, vocab_size=lm.vocab_size, name=str(textfile))
        reference = None
        if against is not None:
            reference, tokenizer = _open_reference(against, progress)
            require_same_tokens(text, lm.tokenizer, tokenizer, name=against)
        progress(f"scoring {len(text.ids)} tokens")
    with cli_tables.progress_bar("scoring") as bar:
        return run(lm, text, reference=reference, progress=bar, **sizes), lm.prefill_products


def _open_reference(against: str, progress: "Callable[[str], None]") -> "tuple[ScoringModel, Tokenizer | None]":
    """A bundle, opened without torch, or anything else that `export` reads, as an eager module."""
    if (Path(against) / MANIFEST_FILE).is_file():
        from graphport.runtime import load_language_model

        progress("opening the other bundle")
        other = load_language_model(against, max_batch=1)
        return other, other.tokenizer
    import tokenizers

    from graphport.runtime.tokenizer import Tokenizer

    try:
        from graphport.export.eager_reference import open_reference
    except ModuleNotFoundError as error:
        raise missing_dependency("eval --against SOURCE", error) from error
    progress("reading the source")
    source = open_reference(against)
    cli_tables.print_notes(source.notes)
    json_text = source.tokenizer_json
    return source, None if json_text is None else Tokenizer(tokenizers.Tokenizer.from_str(json_text))


def _coverage(result: "Evaluation") -> str:
    """`1500 tokens in 2 windows of 1024, 1 not scored (nothing stands before it)`."""
    windows = f"{result.windows} window{'s' if result.windows > 1 else ''} of at most {result.context} tokens"
    left_out = ""
    if result.not_scored:
        left_out = f", {result.not_scored} not scored: the first of a window has nothing before it"
    return f"{result.tokens} tokens in {windows}{left_out}"
