"""The original once more, for `graphport verify --against SOURCE`.

In: a bundle folder and its source. Out: a certificate made of eager PyTorch now, for the runtime to hold the bundle to.
It runs no bundle (see `graphport.runtime.verification`) and changes nothing on disk.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from graphport.export.bundle_certificate import describe_candidate
from graphport.export.encoder_parity import STATE_TOLERANCES
from graphport.export.graph_pass import CompilePlan
from graphport.export.model_kinds import kind_of
from graphport.export.original import draft_certificate
from graphport.export.source import open_source
from graphport.export.targets import TargetError, find_target
from graphport.model_def.certificate import (
    Certificate,
    CertificateError,
    Check,
    certified_files,
    loss_in,
    read_certificate,
)
from graphport.model_def.compact_rows import CompactRows
from graphport.model_def.conditioning import LOSS_FACTOR, FloatLoss
from graphport.model_def.config import TransformerConfig
from graphport.model_def.flags import require_flags
from graphport.model_def.signature import CERTIFICATE_FILE, Manifest, read_manifest


def fresh_certificate(
    bundle: str | Path,
    source: str | Path,
    *,
    replace: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Certificate, tuple[Check, ...]]:
    """Eager PyTorch's side of a certificate for `bundle`, from `source` and this machine.

    Where the bundle has a certificate, its inputs, limits and own rows are kept, and checks say how far its rows of the
    original are from today's. `replace`: one that is damaged, of another format or for other bytes is left aside, with
    a line to `progress`. Raises CertificateError for it otherwise, ManifestError, CheckpointError for an unreadable
    source, TargetError when it is another model.
    """
    require_flags(replace=replace)
    folder = Path(bundle)
    manifest = read_manifest(folder)
    stored = _stored(folder, manifest, replace=replace, progress=progress)
    progress("reading the source")
    seed = 0 if stored is None else next(iter(stored.original.values())).seed
    opened = open_source(source, seed=seed)
    if opened.text is not None and manifest.kind == "encoder":
        opened = opened.text
    config = manifest.config
    if opened.model.config != _of_any_size(config):
        raise TargetError(f"{source} is another model than {folder}: their configurations differ")
    plan = _plan(manifest)
    progress("running eager PyTorch")
    evidence = kind_of(config).evidence(
        config,
        opened.tokenizer_json,
        max_length=manifest.max_length,
        seed=seed,
        model=opened.model,
        inputs=None if stored is None else stored.inputs,
    )
    limits = evidence.limits(plan) if stored is None else stored.limits
    is_kept = stored is not None and stored.conditioning is None  # all rows were within the absolute limits
    measures = not is_kept and any(limit.conditioned for limit in limits)
    conditioning = evidence.conditioning(measure=True) if measures else None
    draft = draft_certificate(
        opened,
        evidence,
        limits=limits,
        files=certified_files(manifest),
        candidate=describe_candidate(plan) if stored is None else dict(stored.candidate),
    )
    draft = dataclasses.replace(draft, conditioning=conditioning)
    if stored is None:
        return draft, ()
    kept = dataclasses.replace(draft, shipped=stored.shipped, checks=stored.checks, layers=stored.layers)
    loss = loss_in(kept)
    return kept, tuple(
        _again(stored.original[output], rows, output, loss(output)) for output, rows in draft.original.items()
    )


def _stored(folder: Path, manifest: Manifest, *, replace: bool, progress: Callable[[str], None]) -> Certificate | None:
    if not (folder / CERTIFICATE_FILE).is_file():
        progress(f"{folder} has no certificate: one is made")
        return None
    try:
        return read_certificate(folder, manifest)
    except CertificateError as error:
        if not replace:
            raise
        progress(f"replacing the certificate: {error}")
        return None


def _plan(manifest: Manifest) -> CompilePlan:
    target = find_target(manifest.target)
    return CompilePlan(
        config=manifest.config,
        target=target,
        precision=target.precision(manifest.precision, has_cache=kind_of(manifest.config).has_cache),
        max_length=manifest.max_length,
        cache=next((cache for cache in target.caches if cache.dtype == manifest.cache_dtype), None),
    )


def _of_any_size(config: TransformerConfig) -> TransformerConfig:
    """The configuration as its source has it: the size of images is fixed at export."""
    if config.image is None:
        return config
    return dataclasses.replace(config, image=dataclasses.replace(config.image, fixed_size=None))


def _again(stored: CompactRows, today: CompactRows, output: str, loss: FloatLoss | None) -> Check:
    """How far eager was then from today's; kernels of another machine lose as much as float32 does."""
    gaps = np.abs(stored.projections.astype(np.float64) - today.projections)
    rms = float(np.sqrt((gaps**2).mean(axis=1).max() / stored.width))
    scale = max(today.scale, np.finfo(np.float64).tiny)
    relative, tolerance = rms / scale, STATE_TOLERANCES["compiled", "relative"]
    if loss is not None:
        tolerance = max(tolerance, LOSS_FACTOR * float(loss.rms.max()) / scale)
    return Check(
        name=f"reference: {output} of the certificate against eager PyTorch, relative",
        measured=relative if np.isfinite(relative) else float("inf"),
        tolerance=tolerance,
        detail=f"{len(stored.positions)} rows; rms {rms:.3g}",
        inputs="the certificate's own",
    )
