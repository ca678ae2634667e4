"""The command `plan`: memory of weights, cache and workspace against what is free, before anything is taken.

In: a bundle, or a source and the options of an export. Out: a table or JSON on stdout. It allocates, exports and opens
nothing; torch is imported for a SOURCE alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphport import cli_tables
from graphport.cli_export import CacheType, Precision, Target
from graphport.cli_options import Debug, Json, PrefillProducts, missing_dependency
from graphport.model_def.signature import MANIFEST_FILE

if TYPE_CHECKING:
    from graphport.runtime.plan_report import PlanReport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What the command line asks for; None is what it leaves open."""

    target: str | None
    precision: str | None
    kv_cache: str | None
    context: int | None
    batch: int
    prefill_chunk: int | None
    prefill_products: PrefillProducts


def plan(
    source: Annotated[str, typer.Argument(metavar="SOURCE|BUNDLE", help="A bundle, or what could be exported.")],
    *,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens a row (default: the model's).")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows at once.")] = 8,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt tokens a step (default: 64 on cpu, 512 on cuda, 128 with float32 products)."),
    ] = None,
    prefill_products: PrefillProducts = None,
    target: Annotated[Target | None, typer.Option(help="Of a SOURCE: where it will run (default: cpu).")] = None,
    precision: Annotated[Precision | None, typer.Option(help="Of a SOURCE: weights (default: as `export`).")] = None,
    kv_cache: Annotated[CacheType | None, typer.Option(help="Of a SOURCE: element type of the KV cache.")] = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Show the memory that SOURCE or BUNDLE needs, and what of it would fit into what is free. Takes nothing."""
    wish = _Wish(
        target=target,
        precision=precision,
        kv_cache=kv_cache,
        context=context,
        batch=batch,
        prefill_chunk=prefill_chunk,
        prefill_products=prefill_products,
    )
    is_bundle = (Path(source) / MANIFEST_FILE).is_file()
    if prefill_products == "float32" and not is_bundle:
        raise typer.BadParameter("--prefill-products is for a BUNDLE, whose graph says whether it can have them")
    report = _bundle_report(Path(source), wish) if is_bundle else _source_report(source, wish)
    row = _row(source, report, is_estimate=not is_bundle)
    if as_json:
        print(json.dumps(row))
    else:
        cli_tables.print_plan(row)


def _bundle_report(path: Path, wish: _Wish) -> "PlanReport":
    given = [f"--{name.replace('_', '-')}" for name in ("target", "precision", "kv_cache") if getattr(wish, name)]
    if given:
        raise typer.BadParameter(f"{', '.join(given)} is for a SOURCE; {path} is a bundle and has its own")
    from graphport.runtime.bundle_files import open_bundle
    from graphport.runtime.memory_plan import RunLimits
    from graphport.runtime.plan_report import report_bundle
    from graphport.runtime.prefill_products import default_chunk
    from graphport.runtime.tuning import prompt_phase, tuned_choice

    bundle = open_bundle(path)
    length = wish.context or bundle.manifest.max_length
    choice = tuned_choice(bundle, device="auto")
    products, chunk = prompt_phase(
        choice, products=wish.prefill_products, chunk=wish.prefill_chunk, max_length=wish.context
    )
    chunk = chunk or default_chunk(bundle.manifest.target, products)
    limits = RunLimits(max_batch=wish.batch, max_length=length, prefill_chunk=chunk)
    return report_bundle(bundle, limits, prefill_products=products)


def _source_report(source: str, wish: _Wish) -> "PlanReport":
    try:
        from graphport.export.planned_source import planned_source
    except ModuleNotFoundError as error:
        raise missing_dependency("plan", error) from error
    from graphport.runtime.memory_plan import RunLimits
    from graphport.runtime.plan_report import report_config
    from graphport.runtime.prefill_products import default_chunk

    planned = planned_source(
        source,
        target=wish.target or "cpu",
        precision=wish.precision,
        kv_cache=wish.kv_cache or "auto",
        context=wish.context,
    )
    return report_config(
        planned.config,
        RunLimits(
            max_batch=wish.batch,
            max_length=planned.context,
            prefill_chunk=wish.prefill_chunk or default_chunk(planned.target, "as_exported"),
        ),
        device="cuda" if planned.target == "cuda" else "cpu",
        float_type=planned.float_type,
        cache_dtype=planned.cache_dtype,
        weights=planned.weights,
        blocks=planned.blocks,
        fused_attention=planned.fused_attention,
        window_layers=planned.window_layers,
    )


def _row(source: str, report: "PlanReport", *, is_estimate: bool) -> dict[str, Any]:
    from graphport.runtime.memory_plan import PLANNED_PARTS

    limits = report.plan.limits
    return {
        "source": source,
        "is_estimate": is_estimate,
        "device": report.plan.device,
        "batch": limits.max_batch,
        "context": limits.max_length,
        "kv_cache": report.cache_dtype,
        "bytes": {name: getattr(report.plan, name) for name in PLANNED_PARTS},
        "total": report.plan.total,
        "free": report.free,
        "fits": report.fits,
        "longest_context_that_fits": report.longest,
        "largest_batch_that_fits": report.most_rows,
    }
