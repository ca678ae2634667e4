"""The original once more, for `graphport verify --against SOURCE`.

In: a bundle folder and its source. Out: a certificate made of eager PyTorch now, for the runtime to hold the bundle to.
It runs no bundle (see `graphport.runtime.verification`) and changes nothing on disk.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from graphport.export.bundle_certificate import describe_candidate
from graphport.export.certify import eager_logits, parity_ids
from graphport.export.graph_pass import CompilePlan
from graphport.export.original import draft_certificate, limits_of
from graphport.export.parity import TOLERANCES
from graphport.export.source import SourceModel, open_source
from graphport.export.targets import TargetError, find_target
from graphport.model_def.certificate import (
    Certificate,
    CertificateError,
    Check,
    certified_files,
    read_certificate,
)
from graphport.model_def.certified_runs import text_length
from graphport.model_def.compact_logits import compare_rows
from graphport.model_def.signature import Manifest, read_manifest


def fresh_certificate(
    bundle: str | Path, source: str | Path, *, progress: Callable[[str], None] = lambda _: None
) -> tuple[Certificate, tuple[Check, ...]]:
    """Eager PyTorch's side of a certificate for `bundle`, from `source` and this machine.

    Where the bundle has a certificate, its text, limits and own rows are kept, and a check says how far its rows of
    the original are from today's. Raises ManifestError, CheckpointError for an unreadable source, TargetError
    when it is another model.
    """
    folder = Path(bundle)
    manifest = read_manifest(folder)
    try:
        stored = read_certificate(folder, manifest)
    except CertificateError as error:
        progress(str(error))
        stored = None
    progress("reading the source")
    opened = open_source(source, seed=0 if stored is None else stored.original.seed)
    if opened.model.config != manifest.config:
        raise TargetError(f"{source} is another model than {folder}: their configurations differ")
    progress("running eager PyTorch")
    return _against(opened, manifest, stored)


def _against(
    opened: SourceModel, manifest: Manifest, stored: Certificate | None
) -> tuple[Certificate, tuple[Check, ...]]:
    target = find_target(manifest.target)
    plan = CompilePlan(
        config=manifest.config,
        target=target,
        precision=target.precision(manifest.precision),
        max_length=manifest.max_length,
        cache=next((cache for cache in target.caches if cache.dtype == manifest.cache_dtype), None),
    )
    seed = 0 if stored is None else stored.original.seed
    if stored is None:
        ids = parity_ids(plan.config, opened.tokenizer_json, max_length=plan.max_length, seed=seed)
        ids = ids[: text_length(plan.config, plan.max_length)]
    else:
        ids = list(stored.ids)
    logits = eager_logits(opened.model, ids)
    draft = draft_certificate(
        opened,
        logits,
        ids,
        max_length=plan.max_length,
        limits=limits_of(plan.precision, plan.cache) if stored is None else stored.limits,
        files=certified_files(manifest),
        candidate=describe_candidate(plan) if stored is None else dict(stored.candidate),
        seed=seed,
    )
    if stored is None:
        return draft, ()
    errors = compare_rows(stored.original, logits)
    again = Check(
        name="reference: max_abs of the stored rows against eager PyTorch",
        measured=errors.figure("max_abs"),
        tolerance=TOLERANCES["compiled", "max_abs"],
        detail=errors.detail(),
        inputs=f"the certificate's {len(ids)} tokens in one piece",
    )
    return dataclasses.replace(draft, shipped=stored.shipped, checks=stored.checks, layers=stored.layers), (again,)
