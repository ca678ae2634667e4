"""Run a bundle's certificate again on this machine: through the session and tokenizer that serve.

In: a bundle folder. Out: checks, and what is other here than where the certificate was made. It needs no torch; a fresh
reference comes from outside (see `export/verify.py`).
"""

import dataclasses
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphport.model_def.certificate import (
    Certificate,
    Check,
    Surroundings,
    error_series,
    loss_in,
    read_certificate,
)
from graphport.model_def.file_hashes import record_file
from graphport.model_def.played_runs import Evidence, References
from graphport.model_def.signature import (
    CERTIFICATE_FILE,
    MANIFEST_FILE,
    Manifest,
    ManifestError,
    read_manifest,
)
from graphport.model_def.text_corpus import CHATS, TEXTS, Message, TextEvidence
from graphport.model_def.whole_files import write_text
from graphport.runtime.bundle_files import BundleFiles, open_bundle
from graphport.runtime.certified_bundle import changed_files, surroundings
from graphport.runtime.certified_model import open_certified
from graphport.runtime.chat_template_error import ChatTemplateError
from graphport.runtime.device import DeviceWish
from graphport.runtime.tokenizer import Tokenizer

_NAMED_IDS = 8  # of a vocabulary that differs


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was measured here. `notes`: what is other here than where the certificate was made, and what no run reaches.

    `certificate` holds the same as it would be written (None when the files changed: nothing was run).
    """

    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    certificate: Certificate | None

    @property
    def passed(self) -> bool:
        """Whether there are checks and all hold."""
        return bool(self.checks) and all(check.passed for check in self.checks)


def verify(
    bundle: str | Path,
    *,
    certificate: Certificate | None = None,
    references: tuple[Check, ...] = (),
    device: DeviceWish = "auto",
    threads: int | None = None,
    keep_rows: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Check the files' hashes, tokenizer, chat template, and the rows of every run of the certificate.

    `certificate`: the one to hold the bundle to, by default its own. `references`: checks of that one's reference, to
    be counted too. `keep_rows` makes the bundle's rows anew, for a certificate that is to be written. Raises
    ManifestError, CertificateError for a certificate that says nothing about the bundle, and what opening a session
    raises.
    """
    folder = Path(bundle)
    manifest = read_manifest(folder)
    progress("hashing the files")
    files = _files_check(folder, manifest)
    if not files.passed:
        return Verification(checks=(files,), notes=(), certificate=None)
    held_to = read_certificate(folder, manifest) if certificate is None else certificate
    opened = open_bundle(folder)
    checks = [files, *references, *_text_checks(opened, held_to.texts)]
    progress("opening the graph")
    model = open_certified(opened, held_to.inputs, device=device, threads=threads, prepared=not keep_rows)
    here = surroundings(model.device)
    differences = () if certificate is not None and keep_rows else here.differences(held_to.candidate)
    if model.is_prepared:
        differences = (*differences, "graph: as exported in the certificate, packed for this processor here")
    rows = References(
        original=held_to.original,
        shipped={} if keep_rows else held_to.shipped,
        limits=[limit for limit in held_to.limits if limit.where == "anywhere" or not differences],
        keep_rows=keep_rows,
        loss=loss_in(held_to),
    )
    evidence = model.play(rows, observe=progress)
    checks += evidence.checks
    conditioning = () if held_to.conditioning is None else (held_to.conditioning.words,)
    notes = (*differences, *conditioning, *(f"not covered: {words}" for words in held_to.uncovered))
    made = _measured(held_to, here, tuple(checks), evidence, keep_rows=keep_rows)
    return Verification(checks=tuple(checks), notes=notes, certificate=made)


def write_certificate(folder: Path, verification: Verification) -> None:
    """Make what was measured the bundle's certificate, and list it in the manifest; both are replaced whole.

    Raises ValueError when a check failed.
    """
    if not verification.passed or verification.certificate is None:
        raise ValueError(f"{folder}: a check failed, so no certificate was written")
    manifest = read_manifest(folder)
    path = folder / CERTIFICATE_FILE
    write_text(path, verification.certificate.to_json())
    record = record_file(path)
    listed = dataclasses.replace(manifest, files={**manifest.files, CERTIFICATE_FILE: record})
    write_text(folder / MANIFEST_FILE, listed.to_json())


def _measured(
    held_to: Certificate, here: Surroundings, checks: tuple[Check, ...], evidence: Evidence, *, keep_rows: bool
) -> Certificate:
    """The certificate with what was measured here; checks that only an export can make are kept."""
    names = {check.name for check in checks}
    kept = tuple(check for check in held_to.checks if check.name not in names)
    candidate = {**held_to.candidate, **dataclasses.asdict(here), "machine": platform.machine()}
    return dataclasses.replace(
        held_to,
        candidate=candidate,
        checks=(*kept, *checks),
        shipped=evidence.rows if keep_rows else held_to.shipped,
        errors=error_series(evidence.errors),
    )


def _files_check(folder: Path, manifest: Manifest) -> Check:
    changed = changed_files(folder, manifest)
    detail = f"missing or changed: {', '.join(changed)}" if changed else f"{len(manifest.files)} files unchanged"
    return Check(
        name="files: changed since the export",
        measured=float(len(changed)),
        tolerance=0.0,
        detail=detail,
        inputs=f"SHA-256 of the files that {MANIFEST_FILE} lists",
    )


def _text_checks(bundle: BundleFiles, texts: TextEvidence | None) -> list[Check]:
    if texts is None:
        return []
    if not bundle.has_tokenizer:
        raise ManifestError(f"{bundle.folder} was certified with a tokenizer and has none; export the bundle again")
    tokenizer = Tokenizer.load(bundle.folder)
    wrong = texts.wrong_texts(tokenizer.encode)
    checks = [
        _count_check("tokenizer: texts with other ids", [f"{text!r:.60}" for text in wrong], len(TEXTS)),
        *_vocabulary_checks(tokenizer, texts),
    ]
    if texts.chats is not None:
        others = texts.wrong_chats(lambda chat: _rendered(tokenizer, chat))
        names = [f"{CHATS[i][-1]['content']!r:.60}" for i in others]
        checks.append(_count_check("chat template: chats written otherwise", names, len(CHATS)))
    return checks


def _vocabulary_checks(tokenizer: Tokenizer, texts: TextEvidence) -> tuple[Check, ...]:
    wanted, found = texts.vocabulary, tokenizer.vocabulary_evidence()
    others = wanted.other_ids(found)
    named = ", ".join(f"{number} {tokenizer.token(number)!r:.40}" for number in others[:_NAMED_IDS])
    more = f" and {len(others) - _NAMED_IDS} more" if len(others) > _NAMED_IDS else ""
    where = f"other tokens than the reference's at ids {named}{more}" if others else "at an id that cannot be told"
    is_other, has_other_rules = wanted.tokens != found.tokens, wanted.rules != found.rules
    return (
        Check(
            name="tokenizer: ids with other tokens",
            measured=float(max(len(others), is_other)),
            tolerance=0.0,
            detail=where if is_other else f"all {len(wanted.marks)} equal",
            inputs="the spelling of every token, and the ids of its own text",
        ),
        Check(
            name="tokenizer: merges or scores",
            measured=float(has_other_rules),
            tolerance=0.0,
            detail="other than the reference's" if has_other_rules else "equal" if wanted.rules else "it has none",
            inputs="all of them, in order",
        ),
    )


def _count_check(name: str, wrong: list[str], total: int) -> Check:
    detail = f"{len(wrong)} of {total}: {', '.join(wrong)}" if wrong else f"all {total} equal"
    return Check(name=name, measured=float(len(wrong)), tolerance=0.0, detail=detail, inputs="the shipped corpus")


def _rendered(tokenizer: Tokenizer, chat: Sequence[Message]) -> str | None:
    try:
        return tokenizer.render_chat_template(chat)
    except ChatTemplateError:  # the reference may refuse the chat too
        return None
