"""`graphport tune`: open a bundle as choices say, hold it to its certificate, time a request, write down what is best.

In: a bundle folder with a certificate. Out: `Tuning`, and `tuning.json` in the folder, whole or not at all. What is
tried is `tuner.py`'s, how it is judged `trials.py`'s. What the manifest lists is changed by `drop_slow_fusions` alone.
"""

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
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.prefill_products import can_have_float_products, default_chunk
from graphport.runtime.preparation import prepare
from graphport.runtime.prepared import find_prepared, source_hashes
from graphport.runtime.served_model import ServedModel
from graphport.runtime.session import Session
from graphport.runtime.tuner import Open, questions, require_within_tolerance, tune_choice
from graphport.runtime.tuning import Choice, Trial, Tuning, prepared_hash
from graphport.runtime.tuning_fusions import Fusions, measure_fusions, retold

MAX_SECONDS = 100.0
PROMPT_TOKENS, NEW_TOKENS = 256, 32

_FUSIONS_SHARE = 0.5  # of the time, where fusions are measured


class TuneError(ValueError):
    """A bundle that cannot be tuned; it is opened as it was."""


def tune(
    bundle: str | os.PathLike[str],
    *,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    max_seconds: float = MAX_SECONDS,
    fusions: Fusions | None = None,
    drop_slow_fusions: bool = False,
    open_choice: Open | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Tuning:
    """Measure how `bundle` is fastest on this machine, for `write_tuning` to keep.

    Timed is a prompt of `prompt_tokens` and `new_tokens` one by one after it, by default 256 and 32, or what a shorter
    text has room for; no trial begins after `max_seconds`.
    `fusions` makes bundles without one fusion after the other: they are timed first, in half of the time. With
    `drop_slow_fusions` the bundle is exported again without those that it is faster without, certified, before anything
    else is asked of it; otherwise they are named, for a graph is exported, not opened otherwise. `open_choice` opens a
    choice, by default an `OpenedChoice`. Raises TuneError for a bundle that is not a decoder for the CPU and for a
    request that the certificate's text is too short for, CertificateError where no certificate says what it should
    compute, ValueError when it fails that, OSError when the system does not tell the processor.
    """
    if drop_slow_fusions and fusions is None:
        raise TuneError("drop_slow_fusions exports the bundle again, from its source; give fusions (--against SOURCE)")
    tuned = _tunable(bundle, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    dropped: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    left = max_seconds
    if fusions is not None:
        begin = time.monotonic()
        slow, trials = _fusion_trials(tuned, fusions, max_seconds=_FUSIONS_SHARE * max_seconds, observe=progress)
        left -= time.monotonic() - begin
        if slow and drop_slow_fusions:
            progress(f"exporting again without {', '.join(slow)}")
            dropped, trials = _drop(tuned, fusions, slow, trials)
            tuned = _tunable(bundle, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        else:
            trials = retold(trials, "faster by more than the noise: --drop-slow-fusions exports without it", kept=False)
    choice, more = tune_choice(
        tuned.first,
        questions(
            has_packed=tuned.first.packed,
            has_float_products=can_have_float_products(tuned.files),
            processors=tuned.first.threads,
            longest_chunk=tuned.request.prompt,
        ),
        open_choice or (lambda choice: OpenedChoice(tuned.files, tuned.certificate, choice, tuned.request)),
        max_seconds=max(0.0, left),
        observe=progress,
    )
    return Tuning(
        onnxruntime=onnxruntime.__version__,
        processor=processor_kind(),
        processors=tuned.first.threads,
        sources=source_hashes(tuned.files.manifest),
        prepared=prepared_hash(tuned.files.folder),
        request=f"a prompt of {tuned.request.prompt} tokens and {tuned.request.new} more one by one",
        choice=choice,
        trials=(*trials, *more),
        dropped=dropped,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tunable:
    """A bundle, its certificate, what is timed, and how it is opened by default."""

    files: BundleFiles
    certificate: Certificate
    request: "Request"
    first: Choice


def _tunable(bundle: str | os.PathLike[str], *, prompt_tokens: int | None, new_tokens: int | None) -> _Tunable:
    files = open_bundle(bundle)
    manifest = files.manifest
    if manifest.target != "cpu" or manifest.kind != "decoder":
        raise TuneError(f"{files.folder} is a {manifest.kind} for {manifest.target}; only decoders for cpu are tuned")
    certificate = read_certificate(files.folder, manifest)
    return _Tunable(
        files=files,
        certificate=certificate,
        request=_request(len(text_of(certificate)), prompt_tokens=prompt_tokens, new_tokens=new_tokens),
        first=Choice(
            packed=not isinstance(find_prepared(files), str),
            threads=default_threads(),
            spinning=True,
            prefill_products="as_exported",
            prefill_chunk=default_chunk(manifest.target, "as_exported"),
        ),
    )


def _fusion_trials(
    tuned: _Tunable, fusions: Fusions, *, max_seconds: float, observe: Callable[[str], None]
) -> tuple[tuple[str, ...], tuple[Trial, ...]]:
    """The fusions that the bundle, opened by default, is faster without, and all trials."""
    end = time.monotonic() + max_seconds

    def opened(folder: Path) -> OpenedChoice:
        if tuned.first.packed and folder != tuned.files.folder:
            prepare(folder)
        return OpenedChoice(open_bundle(folder), tuned.certificate, tuned.first, tuned.request)

    incumbent = opened(tuned.files.folder)
    require_within_tolerance(incumbent)
    return measure_fusions(fusions, incumbent, opened, has_time=lambda: time.monotonic() < end, observe=observe)


def _drop(
    tuned: _Tunable, fusions: Fusions, slow: tuple[str, ...], trials: tuple[Trial, ...]
) -> tuple[tuple[str, ...], tuple[Trial, ...]]:
    """Export the bundle again without `slow`, packed if it was; what was dropped, and the trials with what became."""
    try:
        fusions.drop(slow)
    except (ValueError, OSError) as error:  # the bundle is as it was, and the questions about it remain
        return (), retold(trials, f"left: the bundle cannot be exported without it ({error})", kept=False)
    if tuned.first.packed:
        prepare(tuned.files.folder)
    return slow, retold(trials, "kept: faster by more than the noise, and the bundle was exported again without it")


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
            prefill_products=choice.prefill_products,
        )
        if self._session.is_prepared != choice.packed:
            raise TuneError(f"{bundle.folder}: what is prepared cannot be used; do `graphport prepare {bundle.folder}`")
        self.bundle = bundle.folder
        self._certificate = certificate
        self._choice = choice
        self._request = request
        self._ids = np.array([text_of(certificate)[:length]], np.int64)

    @property
    def planned_bytes(self) -> int:
        """See Candidate."""
        return self._session.memory_plan.total

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
