"""Run the evidence of an encoder-decoder's bundle again on this machine.

In: a bundle folder and, for the comparison with eager PyTorch, its source. Out: checks. It changes nothing on disk.
"""

from collections.abc import Callable
from pathlib import Path

from graphport.export.certify_encoder_decoder import EncoderDecoderEvidence
from graphport.export.graph_pass import CompilePlan
from graphport.export.source import open_source
from graphport.export.targets import CPU, TargetError, find_target
from graphport.model_def.certificate import Check
from graphport.model_def.file_hashes import hash_file
from graphport.model_def.signature import TOKENIZER_FILE, Manifest, read_manifest


def verify_encoder_decoder(
    bundle: str | Path, *, against: str | Path | None = None, progress: Callable[[str], None] = lambda _: None
) -> tuple[Check, ...]:
    """Check the files' hashes, that the graphs agree with themselves, and that they agree with eager PyTorch.

    With themselves: padded sources and single steps give what each source gives alone in one piece. Without `against`
    the last comparison is left out: it needs the source. Raises ManifestError when `bundle` is none, TargetError when
    this machine cannot run it, CheckpointError for an unreadable source.
    """
    folder = Path(bundle)
    manifest = read_manifest(folder)
    progress("hashing the files")
    checks = [_hash_check(folder, manifest)]
    if not checks[0].passed:
        return tuple(checks)
    target = find_target(manifest.target)
    if target is not CPU:
        raise TargetError(f"{folder} is for {target.name}; verify runs encoder-decoders for the cpu target")
    plan = CompilePlan(
        config=manifest.config,
        target=target,
        precision=target.precision(manifest.precision),
        max_length=manifest.max_length,
    )
    path = folder / TOKENIZER_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else None
    model = None
    if against is not None:
        progress("reading the source")
        model = open_source(against, seed=0).model
        if model.config != manifest.config:
            raise TargetError(f"{against} is another model than {folder}: their configurations differ")
    evidence = EncoderDecoderEvidence(manifest.config, text, max_length=manifest.max_length, seed=0, model=model)
    progress("padded sources and steps against each source alone")
    checks += evidence.certify_alone(plan, folder=folder)
    if model is not None:
        progress("eager PyTorch against the bundle")
        checks += evidence.certify_shipped(plan, folder=folder)
    return tuple(checks)


def _hash_check(folder: Path, manifest: Manifest) -> Check:
    changed = [
        name
        for name, record in manifest.files.items()
        if not (folder / name).is_file() or hash_file(folder / name) != record.sha256
    ]
    detail = f"missing or changed: {', '.join(changed)}" if changed else f"{len(manifest.files)} files unchanged"
    return Check(name="files: changed since the export", measured=float(len(changed)), tolerance=0.0, detail=detail)
