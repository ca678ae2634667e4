"""`graphport tune`: open a bundle as choices say, hold it to its certificate, time a request, write down what is best.

In: a bundle folder with a certificate. Out: `Tuning`, and `tuning.json` in the folder, whole or not at all. How trials
are judged is `tuner.py`'s; nothing that the manifest lists is changed.
"""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime

from graphport.model_def.certificate import Certificate, Check, loss_in, read_certificate, text_of
from graphport.model_def.decoder_runs import CachedModel
from graphport.model_def.played_runs import Emit, References, Run, play_runs
from graphport.model_def.processor import processor_kind
from graphport.model_def.signature import LOGITS, TUNING_FILE
from graphport.model_def.whole_files import write_text
from graphport.runtime.bundle_files import BundleFiles, open_bundle
from graphport.runtime.device import default_threads
from graphport.runtime.limits import checked_count
from graphport.runtime.memory_plan import PREFILL_CHUNKS, RunLimits
from graphport.runtime.preparation import prepare
from graphport.runtime.prepared import find_prepared, source_hashes
from graphport.runtime.served_model import ServedModel
from graphport.runtime.session import Session
from graphport.runtime.tuner import NO_TIME, Candidate, questions, run_trial, tune_choice, unmeasured
from graphport.runtime.tuning import Choice, Trial, Tuning, prepared_hash

MAX_SECONDS = 100.0
PROMPT_TOKENS, NEW_TOKENS = 256, 32

OpenChoice = Callable[[Choice], Candidate]
Variant = tuple[str, Callable[[], Path]]


class TuneError(ValueError):
    """A bundle that cannot be tuned; it is opened as it was."""


def tune(
    bundle: str | os.PathLike[str],
    *,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    max_seconds: float = MAX_SECONDS,
    variants: Sequence[Variant] = (),
    open_choice: OpenChoice | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Tuning:
    """Measure how `bundle` is fastest on this machine, for `write_tuning` to keep.

    Timed is a prompt of `prompt_tokens` and `new_tokens` one by one after it, by default 256 and 32, or what a shorter
    text has room for; no trial begins after `max_seconds`.
    `variants` are fusions by name and what makes a bundle without them: they are timed last and change no choice, for a
    graph is exported, not opened otherwise. `open_choice` opens a choice, by default an `OpenedChoice`. Raises
    TuneError for a bundle that is not a decoder for the CPU and for a request that the certificate's text is too short
    for, CertificateError where no certificate says what it should compute, ValueError when it fails that, OSError when
    the system does not tell the processor.
    """
    files = open_bundle(bundle)
    manifest = files.manifest
    if manifest.target != "cpu" or manifest.kind != "decoder":
        raise TuneError(f"{files.folder} is a {manifest.kind} for {manifest.target}; only decoders for cpu are tuned")
    certificate = read_certificate(files.folder, manifest)
    request = _request(len(text_of(certificate)), prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    has_packed = not isinstance(find_prepared(files), str)
    processors = default_threads()
    first = Choice(packed=has_packed, threads=processors, spinning=True, prefill_chunk=PREFILL_CHUNKS[manifest.target])
    end = time.monotonic() + max_seconds
    opens = open_choice or (lambda choice: OpenedChoice(files, certificate, choice, request))
    choice, trials = tune_choice(
        first,
        questions(has_packed=has_packed, processors=processors, longest_chunk=request.prompt),
        opens,
        max_seconds=max_seconds,
        observe=progress,
    )
    for rule, make in variants:
        what = f"without fusion {rule}"
        if time.monotonic() >= end:
            trials += (unmeasured(what, NO_TIME),)
            continue
        progress(f"measuring {what}")
        try:
            other = OpenedChoice(_packed_as(choice, make()), certificate, choice, request)
        except (ValueError, OSError) as error:  # of this variant alone: what was measured so far is kept
            trials += (unmeasured(what, f"left: it cannot be made or opened ({error})"),)
            continue
        trials += (_advised(run_trial(what, opens(choice), other, has_time=lambda: time.monotonic() < end), rule),)
    return Tuning(
        onnxruntime=onnxruntime.__version__,
        processor=processor_kind(),
        processors=processors,
        sources=source_hashes(manifest),
        prepared=prepared_hash(files.folder),
        request=f"a prompt of {request.prompt} tokens and {request.new} more one by one",
        choice=choice,
        trials=trials,
    )


def _packed_as(choice: Choice, folder: Path) -> BundleFiles:
    if choice.packed:
        prepare(folder)
    return open_bundle(folder)


def _advised(trial: Trial, rule: str) -> Trial:
    """What to do about a fusion that costs time here: its graph is another one, so it cannot be chosen at opening."""
    if not trial.kept:
        return trial
    verdict = f"faster by more than the noise: export again with --disable-pass {rule}"
    return dataclasses.replace(trial, kept=False, verdict=verdict)


def write_tuning(bundle: str | os.PathLike[str], tuning: Tuning) -> Path:
    """Make `tuning` the bundle's, in place of what was there; returns the file. Raises OSError."""
    path = Path(bundle) / TUNING_FILE
    write_text(path, json.dumps(tuning.to_dict(), indent=1))
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is timed: tokens of a prompt, and tokens after it one by one."""

    prompt: int
    new: int


def _request(length: int, *, prompt_tokens: int | None, new_tokens: int | None) -> Request:
    """The request on a text of `length` tokens; what is not given is no more than the text has room for."""
    given = [
        None if count is None else checked_count(name, count)
        for name, count in (("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens))
    ]
    new = given[1] or min(NEW_TOKENS, length // 8 if given[0] is None else max(length - given[0], 1))
    prompt = given[0] or min(PROMPT_TOKENS, max(length - new, 1))
    if new < 1 or prompt + new > length:
        raise TuneError(
            f"prompt_tokens ({prompt}) + new_tokens ({new}) exceed the certificate's text of {length} tokens, on which "
            "choices are measured; give smaller numbers"
        )
    return Request(prompt=prompt, new=new)


class OpenedChoice:
    """A session over the folder `bundle`, opened as `choice` says: what it computes, how long `request` takes."""

    def __init__(self, bundle: BundleFiles, certificate: Certificate, choice: Choice, request: Request) -> None:
        length = request.prompt + request.new
        self._session = Session(
            bundle,
            device="cpu",
            limits=RunLimits(max_batch=1, max_length=length, prefill_chunk=choice.prefill_chunk),
            threads=choice.threads,
            spinning=choice.spinning,
            prepared=choice.packed,
        )
        if self._session.is_prepared != choice.packed:
            raise TuneError(f"{bundle.folder}: what is prepared cannot be used; do `graphport prepare {bundle.folder}`")
        self.bundle = bundle.folder
        self._certificate = certificate
        self._choice = choice
        self._request = request
        self._ids = np.array([text_of(certificate)[:length]], np.int64)

    def checks(self) -> Sequence[Check]:
        """See Candidate: the request's last row of every piece and its single tokens, against the original."""
        run = Run(name="request", inputs=self._choice.words(), output=LOGITS, play=self._play)
        limits = [limit for limit in self._certificate.limits if limit.against == "original"]
        references = References(original=self._certificate.original, limits=limits, loss=loss_in(self._certificate))
        return play_runs(ServedModel(self._session, max_length=self._ids.shape[1]), [run], references).checks

    def seconds(self) -> float:
        """See Candidate."""
        model = ServedModel(self._session, max_length=self._ids.shape[1])
        begin = time.perf_counter()
        self._play(model, lambda _, __: None)
        return time.perf_counter() - begin

    def _play(self, model: CachedModel, emit: Emit) -> None:
        prompt, end, size = self._request.prompt, self._request.prompt + self._request.new, self._choice.prefill_chunk
        cuts = [*range(0, prompt, size), *range(prompt, end), end]
        model.open_cache(1)
        for begin, stop in pairwise(cuts):
            emit([stop - 1], model.step(self._ids[:, begin:stop]))
