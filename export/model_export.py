"""The whole way from a source to a bundle on disk.

In: what the user named and asked for. Out: a `Bundle` whose folder appears only when every check passed. It orders the
steps and computes none of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from graphport.export.bare_graph import write_bare_graph
from graphport.export.bundle import Bundle, bundle_folder, check_destination, write_graph
from graphport.export.bundle_certificate import add_certificate, bundle_certificate
from graphport.export.bundle_records import write_records
from graphport.export.calibration import Calibration, read_calibration
from graphport.export.certify import calibrate_cache
from graphport.export.export_limits import (
    longest_context,
    note_pictures,
    require_cache,
    require_image_precision,
    require_image_size,
    require_numbers,
    require_source_precision,
)
from graphport.export.export_options import ExportOptions
from graphport.export.fusion_report import fusion_account
from graphport.export.gguf_matrices import matrix_account
from graphport.export.graph_pass import CompilePlan, PassReport
from graphport.export.kernel_advice import kernel_advice
from graphport.export.layout_files import write_layouts
from graphport.export.layout_parity import layout_checks
from graphport.export.layouts import check_layouts, find_layouts
from graphport.export.measured_inputs import calibration_of, check_range, ranges_of
from graphport.export.model_kinds import KindEvidence, kind_of
from graphport.export.parity import require_passed
from graphport.export.pipeline import check_disabled, check_rules, compile_graph, count_fusions, require_fusions
from graphport.export.plan_weights import plan_weights
from graphport.export.precision_budget import BudgetChoice, budget_checks, check_budget
from graphport.export.precision_choice import (
    FLOAT_SOURCE_PRECISION,
    check_accuracy_level,
    check_exact,
    default_precision,
    kept_matrices,
    note_changed,
)
from graphport.export.site_account import site_account
from graphport.export.source import SourceModel, open_source
from graphport.export.source_graph import compile_source, write_source
from graphport.export.targets import CPU, CacheFormat, Precision, Target, TargetError, find_target
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.export.two_towers import export_towers
from graphport.model_def.certificate import Check
from graphport.model_def.flags import require_flags
from graphport.model_def.signature import Manifest
from graphport.model_def.transformer import Transformer

_CACHE_IDS = 160  # of the calibration text, for the scales of a quantised cache


def export(
    source: str | Path | Transformer,
    out: str | Path,
    *,
    target: str = "cpu",
    precision: str | None = None,
    kv_cache: str = "auto",
    context: int | None = None,
    image_size: tuple[int, int] | None = None,
    accuracy_level: int | None = None,
    calibration: str | Path | None = None,
    max_kl: float | None = None,
    seed: int = 0,
    verify: bool = True,
    require_fused: Mapping[str, int | Literal["all"]] | None = None,
    require_exact: bool = False,
    disable_passes: Sequence[str] = (),
    layouts: Sequence[str] = (),
    force: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Export `source`, a checkpoint, a Python function or a module, to the folder `out`.

    `precision` None is gguf for a GGUF file with quantised blocks on the CPU, and int8 otherwise. `kv_cache` is int8,
    int4 or fp8 as the target has them, or auto: the activations' type. `context` is the longest total length in tokens
    (None: what the model was made for). `image_size` fixes the height and width of an image encoder's images (None:
    any whole number of patches of up to `context` tokens); of two towers both are the images'. `accuracy_level` 0
    multiplies quantised matrices by activations as they are, 4 by activations rounded to 8 bits (None: the target's
    choice). `calibration` is a file of UTF-8 text on which int8, int4 and auto are calibrated (None: the text that
    ships). `max_kl` is the budget of precision auto in nats (None: 0.01): the divergence that it may show on the part
    of that text that is held out.
    `require_fused` pins how often a rule fires ("all": no candidate left), `require_exact` refuses a GGUF file of which
    a matrix would be encoded anew. `disable_passes` names rules that are not to fuse anything. `layouts` are
    genai and optimum: graphs over the same weights for these runtimes, beside the bundle's own. `progress` is told each
    stage as it begins. Raises ValueError subclasses, one line each: CheckpointError, ConfigError, CalibrationError,
    TargetError, LayoutError, ExportError, FusionError, ParityError, BundleError. Nothing is left at `out` after a
    failure.
    """
    options = ExportOptions(
        target=target,
        precision=precision,
        kv_cache=kv_cache,
        context=context,
        image_size=image_size,
        accuracy_level=accuracy_level,
        calibration=calibration,
        max_kl=max_kl,
        seed=seed,
        verify=verify,
        require_fused=require_fused or {},
        require_exact=require_exact,
        disable_passes=tuple(disable_passes),
        layouts=tuple(layouts),
        force=force,
        progress=progress,
    )
    _check_options(options)
    check_destination(Path(out), force=force)
    progress("reading the model")
    opened = open_source(source, seed=seed)
    if opened.text is not None:
        return export_towers(opened, Path(out), options, export_one=export_opened)
    return export_opened(opened, Path(out), options)


def _check_options(options: ExportOptions) -> None:
    """What can be refused before the source is read; see `export`."""
    target = find_target(options.target)
    precision = target.precision(options.precision or FLOAT_SOURCE_PRECISION, has_cache=False)
    target.cache_format(options.kv_cache, precision)
    require_numbers(seed=options.seed, context=options.context)
    require_flags(verify=options.verify, require_exact=options.require_exact, force=options.force)
    check_rules(options.require_fused)
    check_disabled(options.disable_passes)
    check_budget(options.max_kl, chooses_bits=precision.chooses_bits)
    read_calibration(options.calibration)
    find_layouts(options.layouts)


def export_opened(opened: SourceModel, out: Path, options: ExportOptions) -> Bundle:
    """`export` of a source that is read already, and has one tower."""
    seed, progress, verify = options.seed, options.progress, options.verify
    found_target = find_target(options.target)
    kind = kind_of(opened.model.config)
    if options.kv_cache != "auto" and not kind.has_cache:
        raise TargetError(f"KV cache type {options.kv_cache!r}: an {kind.name} has no KV cache; leave --kv-cache out")
    named = default_precision(opened, found_target) if options.precision is None else options.precision
    found_precision = found_target.precision(named, has_cache=kind.has_cache)
    cache = found_target.cache_format(
        options.kv_cache, found_target.precision(options.precision or FLOAT_SOURCE_PRECISION, has_cache=False)
    )
    budget = check_budget(options.max_kl, chooses_bits=found_precision.chooses_bits)
    found_layouts = find_layouts(options.layouts)
    plan, notes = _plan(
        opened,
        found_target,
        found_precision,
        cache,
        context=options.context,
        image_size=options.image_size,
        accuracy_level=options.accuracy_level,
        disabled=options.disable_passes,
    )
    check_layouts(found_layouts, plan)
    text = read_calibration(options.calibration)
    calibrated = calibration_of(opened, plan, text, seed=seed + 1, name=str(options.calibration))
    if options.require_exact:
        check_exact(plan)
    check_range(opened, plan, seed=seed, progress=progress)
    plan = dataclasses.replace(plan, activation_ranges=ranges_of(opened, plan, calibrated, seed=seed + 1))
    progress("exporting to ONNX")
    module = kind.module(opened.model, plan.max_length)
    exported = torch_to_onnx(module, kind.traced(plan.config), kind.sizes(plan.config))
    with bundle_folder(out, force=options.force) as folder:
        checks: tuple[Check, ...] = ()
        evidence = kind.evidence(
            plan.config, opened.tokenizer_json, max_length=plan.max_length, seed=seed, model=opened.model
        )
        if verify:
            checks = evidence.certify_stages(exported, plan, folder=folder, observe=progress)
            require_passed(checks)
        plan, choice = plan_weights(
            exported, plan, opened.model, calibrated, max_kl=budget, folder=folder, observe=progress
        )
        plan = _with_cache_scales(exported, plan, calibrated, folder=folder, progress=progress)
        progress("compiling the graph")
        compiled, reports, others = _compiled(exported, evidence, plan, folder, required=options.require_fused)
        write_layouts(folder, found_layouts, plan, opened.generation)
        if verify:
            shipped = evidence.certify_cache(exported, plan, folder=folder, observe=progress)
            shipped += layout_checks(folder, found_layouts, plan, seed=seed)
            require_passed(shipped)
            checks += shipped + budget_checks(choice)
            notes += _note_unchecked(plan)
        progress("writing the bundle")
        account = _account(reports, exported, compiled, plan, choice, calibration=options.calibration)
        manifest = write_records(folder, opened, plan, account)
        if verify:
            checks, manifest = _certify(opened, plan, evidence, folder, manifest, checks, observe=progress)
    return Bundle(
        path=out,
        manifest=manifest,
        fusions=count_fusions((*reports, *others)),
        certificate=checks,
        notes=(*opened.notes, *notes, *calibrated.notes, *account["advice"]),
    )


def _account(
    reports: tuple[PassReport, ...],
    exported: ir.Model,
    compiled: ir.Model,
    plan: CompilePlan,
    choice: BudgetChoice | None,
    *,
    calibration: str | Path | None,
) -> dict[str, Any]:
    return fusion_account(
        reports,
        num_nodes=len(compiled.graph),
        advice=kernel_advice(compiled, plan),
        matrices=matrix_account(plan.matrices) if plan.precision.keeps_blocks else (),
        choice=choice,
        accuracy_level=plan.kernel_accuracy,
        sites=site_account(exported, compiled, reports),
        disabled=plan.disabled,
        calibration=None if calibration is None else Path(calibration).name,
    )


def _certify(
    opened: SourceModel,
    plan: CompilePlan,
    evidence: KindEvidence,
    folder: Path,
    manifest: Manifest,
    stages: tuple[Check, ...],
    *,
    observe: Callable[[str], None],
) -> tuple[tuple[Check, ...], Manifest]:
    """Run what ships in `folder`, and write its certificate. Raises ParityError; all checks, and the new manifest."""
    certificate = bundle_certificate(
        opened, plan, evidence, folder=folder, manifest=manifest, stages=stages, observe=observe
    )
    require_passed(certificate.checks)
    return certificate.checks, add_certificate(folder, manifest, certificate)


def _write_encoder(evidence: KindEvidence, plan: CompilePlan, folder: Path) -> tuple[PassReport, ...]:
    """The second graph of an encoder-decoder, compiled and written; what was fused in it."""
    if evidence.source is None:
        return ()
    encoder, reports = compile_source(evidence.source, plan)
    write_source(encoder, folder)
    return reports


def _compiled(
    exported: ir.Model,
    evidence: KindEvidence,
    plan: CompilePlan,
    folder: Path,
    *,
    required: Mapping[str, int | Literal["all"]],
) -> tuple[ir.Model, tuple[PassReport, ...], tuple[PassReport, ...]]:
    """Write the graphs that ship: the model's, the one that a CPU packs for itself, an encoder-decoder's encoder.

    The first, what was fused in it, and what was fused in the encoder.
    """
    compiled = exported.clone()
    reports = compile_graph(compiled, plan)
    require_fusions(reports, required)
    write_graph(compiled, folder)
    if plan.target is CPU:
        write_bare_graph(folder)
    return compiled, reports, _write_encoder(evidence, plan, folder)


def _with_cache_scales(
    exported: ir.Model, plan: CompilePlan, calibration: Calibration, *, folder: Path, progress: Callable[[str], None]
) -> CompilePlan:
    """The plan with the scales of its quantised cache, if it has one."""
    if plan.cache is None:
        return plan
    progress("calibrating the KV cache")
    scales = calibrate_cache(exported, plan, calibration.windows[0][:_CACHE_IDS], folder=folder)
    return dataclasses.replace(plan, cache_scales=scales)


def _note_unchecked(plan: CompilePlan) -> tuple[str, ...]:
    if plan.target is CPU:
        return ()
    return (f"the fused graph was checked on the CPU in fp32, not in {plan.precision.name} on {plan.target.name}",)


def _plan(
    opened: SourceModel,
    target: Target,
    precision: Precision,
    cache: CacheFormat | None,
    *,
    context: int | None,
    image_size: tuple[int, int] | None,
    accuracy_level: int | None,
    disabled: tuple[str, ...],
) -> tuple[CompilePlan, tuple[str, ...]]:
    """What to compile, checked against what the model can do, and notes."""
    config = require_image_size(opened.model.config, image_size, context)
    if config.image is not None:
        require_image_precision(target, precision)
    if config.encoder is not None:
        require_source_precision(target, precision, cache)
    max_length, notes = longest_context(config, context, text_limit=opened.text_limit)
    kind_of(config).check(config, max_length)
    if precision.chooses_bits and not kind_of(config).has_cache:
        raise TargetError(
            "precision auto measures the logits of a decoder, which an encoder lacks: choose int8 or int4"
        )
    if cache is not None:
        require_cache(config, target, cache)
    check_accuracy_level(accuracy_level, target, precision)
    matrices = kept_matrices(opened, target, precision)
    plan = CompilePlan(
        config=config,
        target=target,
        precision=precision,
        max_length=max_length,
        cache=cache,
        matrices=matrices,
        accuracy_level=accuracy_level,
        disabled=disabled,
    )
    return plan, (
        *notes,
        *note_pictures(config, max_length),
        *(note_changed(matrices) if precision.keeps_blocks else ()),
    )
