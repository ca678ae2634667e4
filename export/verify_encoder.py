"""Run the evidence of an encoder's bundle again on this machine.

In: a bundle folder and, for the comparison with eager PyTorch, its source. Out: checks. It changes nothing on disk.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from graphport.export.graph_pass import CompilePlan
from graphport.export.model_kinds import kind_of
from graphport.export.source import open_source
from graphport.export.targets import CPU, TargetError, find_target
from graphport.model_def.certificate import Check
from graphport.model_def.config import TransformerConfig
from graphport.model_def.file_hashes import hash_file
from graphport.model_def.signature import TOKENIZER_FILE, Manifest, read_manifest


def verify_encoder(
    bundle: str | Path, *, against: str | Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> tuple[Check, ...]:
    """Check the files' hashes, that the graph agrees with itself, and that it agrees with eager PyTorch.

    With itself: a padded batch gives what each text gives alone.

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
        precision=target.precision(manifest.precision, has_cache=manifest.cache_dtype is not None),
        max_length=manifest.max_length,
        cache=next((cache for cache in target.caches if cache.dtype == manifest.cache_dtype), None),
    )
    kind = kind_of(manifest.config)
    tokenizer = folder / TOKENIZER_FILE
    text = tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None
    progress(kind.alone)
    evidence = kind.evidence(manifest.config, text, max_length=manifest.max_length, seed=0)
    checks += evidence.certify_alone(plan, folder=folder)
    if against is not None:
        progress("eager PyTorch against the bundle")
        model = open_source(against, seed=0).model
        if model.config != _of_any_size(manifest.config):
            raise TargetError(f"{against} is another model than {folder}: their configurations differ")
        evidence = kind.evidence(manifest.config, text, max_length=manifest.max_length, seed=0, model=model)
        checks += evidence.certify_shipped(plan, folder=folder)
    return tuple(checks)


def _of_any_size(config: TransformerConfig) -> TransformerConfig:
    """The configuration as its source has it: the size of images is fixed at export."""
    if config.image is None:
        return config
    return dataclasses.replace(config, image=dataclasses.replace(config.image, fixed_size=None))


def _hash_check(folder: Path, manifest: Manifest) -> Check:
    changed = [
        name
        for name, record in manifest.files.items()
        if not (folder / name).is_file() or hash_file(folder / name) != record.sha256
    ]
    detail = f"missing or changed: {', '.join(changed)}" if changed else f"{len(manifest.files)} files unchanged"
    return Check(name="files: changed since the export", measured=float(len(changed)), tolerance=0.0, detail=detail)
