"""Run a bundle's evidence again on this machine.

In: a bundle folder and, for the comparison with eager PyTorch, its source. Out: checks. It changes nothing on disk.
"""

from collections.abc import Callable
from pathlib import Path

from graphport.export.certify import certify_bundle, eager_logits, parity_ids, pieces
from graphport.export.graph_pass import CompilePlan
from graphport.export.graph_runner import GraphRunner
from graphport.export.parity import Check, check, compare
from graphport.export.source import open_source
from graphport.export.targets import CPU, TargetError, find_target
from graphport.model_def.checkpoint_record import hash_file
from graphport.model_def.signature import GRAPH_FILE, TOKENIZER_FILE, Manifest, read_manifest


def verify(
    bundle: str | Path, *, against: str | Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> tuple[Check, ...]:
    """Check the files' hashes, that chunks and single steps give the logits of one piece, and eager PyTorch's.

    Without `against` the last comparison is left out: it needs the source. Raises ManifestError when `bundle` is none,
    TargetError when this machine cannot run it, CheckpointError for an unreadable source.
    """
    folder = Path(bundle)
    manifest = read_manifest(folder)
    progress("hashing the files")
    checks = [_hash_check(folder, manifest)]
    if not checks[0].passed:
        return tuple(checks)
    target = find_target(manifest.target)
    if target is not CPU:
        raise TargetError(f"{folder} is for {target.name}; verify runs bundles for the cpu target on this version")
    plan = CompilePlan(
        config=manifest.config,
        target=target,
        precision=target.precision(manifest.precision),
        max_length=manifest.max_length,
        cache=next((cache for cache in target.caches if cache.dtype == manifest.cache_dtype), None),
    )
    tokenizer = folder / TOKENIZER_FILE
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    ids = parity_ids(manifest.config, text, max_length=manifest.max_length, seed=0)
    progress("one piece against chunks and steps")
    runner = GraphRunner(folder / GRAPH_FILE, manifest.config, optimize=True)
    whole, parts = runner.logits(ids), runner.logits(ids, chunks=pieces(len(ids)))
    checks.append(check(*_stage(plan), f"{len(ids)} tokens, chunks and steps against one piece", compare(whole, parts)))
    if against is not None:
        progress("eager PyTorch against the bundle")
        opened = open_source(against, seed=0)
        if opened.model.config != manifest.config:
            raise TargetError(f"{against} is another model than {folder}: their configurations differ")
        checks += certify_bundle(folder, plan, ids, eager_logits(opened.model, ids))
    return tuple(checks)


def _stage(plan: CompilePlan) -> tuple[str, str]:
    """Stage and figure whose tolerance bounds how far chunks and steps may be from one piece."""
    if plan.cache is not None:
        return f"{plan.cache.name} cache", "kl"
    return ("compiled", "max_abs") if plan.precision.weight_bits is None else (plan.precision.name, "kl")


def _hash_check(folder: Path, manifest: Manifest) -> Check:
    changed = [
        name
        for name, record in manifest.files.items()
        if not (folder / name).is_file() or hash_file(folder / name) != record.sha256
    ]
    detail = f"missing or changed: {', '.join(changed)}" if changed else f"{len(manifest.files)} files unchanged"
    return Check(name="files: changed since the export", measured=float(len(changed)), tolerance=0.0, detail=detail)
