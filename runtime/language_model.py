"""A bundle opened for use: text or ids in, text and ids out, whole or streamed, many requests at a time.

In: prompts and SamplingParams. Out: `GenerationOutput`s, `StreamEvent`s, logits. It checks every request before
anything runs; choosing tokens and batching are done by `sampling.py` and `engine.py`.

Limits: prompt + new tokens <= max_length. A prompt of exactly max_length tokens is allowed and gets no new token. Where
max_new_tokens would go beyond, generation ends at max_length; both end with reason "length".
"""

import logging
import os
import threading
from collections import abc, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from graphport.runtime.bundle_files import BundleFiles, open_bundle
from graphport.runtime.certified_bundle import require_certified, require_same_surroundings
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.cuda_setup import GraphWish
from graphport.runtime.device import Device, DeviceWish
from graphport.runtime.engine import Engine
from graphport.runtime.generation_output import GenerationOutput, generation_output
from graphport.runtime.limits import checked_count
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.prompts import checked_prompt_ids
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.sequence import ScoringSequence, Sequence, StreamEvent
from graphport.runtime.session import Session
from graphport.runtime.tokenizer import Tokenizer

Prompt = str | abc.Sequence[int] | NDArray[np.integer[Any]]

PREFILL_CHUNK = 512
DECODER_BATCH = 8

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


def load_language_model(
    bundle: str | os.PathLike[str],
    *,
    device: DeviceWish = "auto",
    device_id: int = 0,
    provider_options: abc.Mapping[str, OptionValue] | None = None,
    max_batch: int = DECODER_BATCH,
    max_length: int | None = None,
    threads: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    cuda_graphs: GraphWish = "auto",
    stream: int | None = None,
    prepared: bool = True,
    strict: bool = False,
) -> "LanguageModel":
    """Open a decoder's bundle.

    device_id: which CUDA device. provider_options: of ONNX Runtime's CUDA provider, for example {"use_tf32": "1"}.
    max_batch: prompts that run together; more are queued. max_length: longest prompt + new tokens, at most and by
    default the bundle's. threads: of the CPU, by default one a core. prefill_chunk: prompt tokens a step, a bound of
    the workspace and of how long running rows wait for a new prompt. cuda_graphs, on CUDA alone: decode steps are
    captured and replayed; "auto" does without, and logs it, where ONNX Runtime cannot capture the graph. stream: the
    cudaStream_t to run on, by default one of the session's own that is ordered with the legacy default stream.
    prepared: on the CPU, take the graph that `prepare` packed for this processor, if there is one.
    strict: refuse changed bytes, a bundle without certificate, and a provider or ONNX Runtime other than certified; the
    graph runs as it was certified, not as packed for this processor.
    Raises ManifestError, CertificateError, DeviceError, NotEnoughMemoryError, and ValueError, also for an encoder's
    bundle.
    """
    files = open_bundle(bundle)
    certificate = require_certified(files) if strict else None
    lm = LanguageModel(
        files,
        device=device,
        device_id=device_id,
        provider_options=provider_options,
        max_batch=max_batch,
        max_length=max_length,
        threads=threads,
        prefill_chunk=prefill_chunk,
        cuda_graphs=cuda_graphs,
        stream=stream,
        prepared=prepared and not strict,
    )
    if certificate is not None:
        require_same_surroundings(certificate, files.folder, lm.device)
    return lm


class LanguageModel:
    """An open bundle. Methods may be called from several threads: their requests share the batch.

    Whoever waits for a result runs the engine's next step, or waits for the step that another thread runs, so a stream
    that nobody reads holds up no one.

    Attributes: `device`, `device_id`, `provider_options` (those that CUDA took), `memory_plan`, `threads`,
    `max_length`, `vocab_size`, `manifest`, `tokenizer` (None if the bundle has none).
    """

    def __init__(
        self,
        bundle: BundleFiles,
        *,
        device: DeviceWish = "auto",
        device_id: int = 0,
        provider_options: abc.Mapping[str, OptionValue] | None = None,
        max_batch: int = DECODER_BATCH,
        max_length: int | None = None,
        threads: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        cuda_graphs: GraphWish = "auto",
        stream: int | None = None,
        prepared: bool = True,
    ) -> None:
        if bundle.manifest.kind != "decoder":
            raise ValueError(
                f"{bundle.folder} is an {bundle.manifest.kind}, which continues no text; use encode or embed"
            )
        longest = bundle.manifest.max_length
        wish = longest if max_length is None else max_length
        self.max_length = checked_count("max_length", wish, most=longest, reason=", the bundle's own")
        limits = RunLimits(
            max_batch=checked_count("max_batch", max_batch),
            max_length=self.max_length,
            prefill_chunk=checked_count("prefill_chunk", prefill_chunk),
        )
        self.manifest = bundle.manifest
        # Both take a good part of a second, the session mostly outside Python's lock.
        with ThreadPoolExecutor(max_workers=1) as executor:
            opening = executor.submit(
                Session,
                bundle,
                device=device,
                device_id=device_id,
                provider_options=provider_options,
                limits=limits,
                threads=threads,
                cuda_graphs=cuda_graphs,
                stream=stream,
                prepared=prepared,
            )
            self.tokenizer = Tokenizer.load(bundle.folder) if bundle.has_tokenizer else None
            session = opening.result()
        self.vocab_size = session.vocab_size
        self.threads = session.threads
        self.is_prepared = session.is_prepared
        self.device: Device = session.device
        self.device_id = session.device_id
        self.provider_options = session.provider_options
        self.memory_plan = session.memory_plan
        self._engine: Engine | None = Engine(
            session, max_batch=limits.max_batch, max_length=self.max_length, prefill_chunk=limits.prefill_chunk
        )
        # A plain lock, not the default one: a collector that runs while this thread holds it must not get in.
        self._turn = threading.Condition(threading.Lock())
        self._is_stepping = False

    def generate(
        self, prompts: abc.Sequence[Prompt], params: SamplingParams | abc.Sequence[SamplingParams] | None = None
    ) -> list[GenerationOutput]:
        """Continue every prompt, a str or a list of ids; outputs in the order of the prompts.

        params: one for all, or one a prompt. All prompts are checked before any runs. Raises TypeError and ValueError
        for requests, NonFiniteLogitsError when the model overflows; no request of the call goes on after an error.
        """
        if isinstance(prompts, str) or not isinstance(prompts, abc.Sequence):
            raise TypeError(
                f"prompts must be a list of str or of lists of ids, got {type(prompts).__name__}; use [prompt]"
            )
        each = _params_for_each(params, len(prompts))
        sequences = [
            self._new_sequence(prompt, one, f"prompt {i}")
            for i, (prompt, one) in enumerate(zip(prompts, each, strict=True))
        ]
        self._run(sequences)
        return [generation_output(sequence) for sequence in sequences]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> abc.Iterator[StreamEvent]:
        """Continue one prompt, token by token; the texts of the events join to the text of `generate`.

        The request is checked now and starts when first iterated. Closing the iterator, or dropping it, cancels the
        request and frees its place in the batch.
        """
        sequence = self._new_sequence(prompt, params or SamplingParams(), "prompt")
        return self._results(sequence, sequence.events)

    def chat(
        self, messages: abc.Sequence[dict[str, Any]], params: SamplingParams | None = None
    ) -> abc.Iterator[StreamEvent]:
        """Stream the answer to `messages` ({"role": ..., "content": ...}), rendered by the bundle's chat template."""
        return self.stream(self._need_tokenizer("chat").apply_chat_template(messages), params)

    def logits(self, prompts: abc.Sequence[abc.Sequence[int] | NDArray[np.integer[Any]]]) -> list[NDArray[np.float32]]:
        """Logits [len, vocab] of every position of each list of ids, through the cache path."""
        if isinstance(prompts, str) or not isinstance(prompts, abc.Sequence):
            raise TypeError(f"logits takes a list of lists of ids, got {type(prompts).__name__}")
        checked = [self._checked_ids(ids, f"prompt {i}") for i, ids in enumerate(prompts)]
        return [self._all_logits(ids) for ids in checked]

    def stream_logits(
        self, ids: abc.Sequence[int] | NDArray[np.integer[Any]], *, first_row: int = 0
    ) -> abc.Iterator[NDArray[np.float32]]:
        """Logits [n, vocab] of the positions of `ids` from `first_row` on, in pieces that are the caller's own.

        A piece is at most 64 MiB or one row, and the next is computed when it is asked for (or by another thread's
        steps). Raises as `generate` does.
        """
        checked = self._checked_ids(ids, "ids")
        if not 0 <= first_row < len(checked):
            raise ValueError(f"first_row must be 0 to {len(checked) - 1}, the last position; got {first_row}")
        sequence = ScoringSequence(checked, vocab_size=self.vocab_size, first_row=first_row)
        return self._results(sequence, sequence.pieces)

    def close(self) -> None:
        """Give the session and the cache back; running requests end as cancelled, later ones raise."""
        with self._turn:
            while self._is_stepping:
                self._turn.wait()
            engine, self._engine = self._engine, None
            for sequence in engine.all_sequences() if engine is not None else ():
                sequence.cancel()
            self._turn.notify_all()

    def __enter__(self) -> "LanguageModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_active(self) -> int:
        """Requests that hold a place in the batch now."""
        return 0 if self._engine is None else self._engine.scheduler.num_active

    @property
    def cuda_graphs(self) -> bool:
        """Whether decode steps are captured as CUDA graphs and replayed."""
        return self._engine is not None and self._engine.session.cuda_graphs

    @property
    def cache_bytes(self) -> int:
        """Bytes that the KV cache takes now."""
        cache = None if self._engine is None else self._engine.cache
        return 0 if cache is None else cache.bytes_for(cache.num_slots, cache.capacity)

    def _new_sequence(self, prompt: Prompt, params: SamplingParams, name: str) -> Sequence:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
        if params.stop:
            self._need_tokenizer("stop strings")
        encoded = self._need_tokenizer("a str prompt").encode(prompt) if isinstance(prompt, str) else prompt
        ids = self._checked_ids(encoded, name)
        own_ends = () if params.ignore_eos else self.manifest.generation.eos_token_ids
        new = self.max_length if params.max_new_tokens is None else params.max_new_tokens
        return Sequence(
            ids,
            params,
            vocab_size=self.vocab_size,
            max_total=min(self.max_length, len(ids) + new),
            end_ids=frozenset(own_ends) | frozenset(params.stop_token_ids),
            text_stream=None if self.tokenizer is None else self.tokenizer.stream(),
            num_text_ids=0 if self.tokenizer is None else self.tokenizer.vocab_size,
        )

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, which this bundle does not have; give prompts as lists of ids")
        return self.tokenizer

    def _checked_ids(self, ids: object, name: str) -> tuple[int, ...]:
        return checked_prompt_ids(ids, name, vocab_size=self.vocab_size, max_length=self.max_length)

    def _run(self, sequences: abc.Sequence[Sequence]) -> None:
        try:
            self._submit(sequences)
            for sequence in sequences:
                while not sequence.is_finished:
                    sequence.events.clear()  # its results are read at the end
                    self._advance(sequence)
                _raise_error(sequence)
        finally:
            self._cancel(sequences)

    def _results(self, sequence: Sequence, results: deque[_Result]) -> abc.Iterator[_Result]:
        """Run `sequence` and give what it puts into its `results`, as it comes."""
        try:
            self._submit([sequence])
            while not sequence.is_finished or results:
                if results:
                    yield results.popleft()
                else:
                    self._advance(sequence)
            _raise_error(sequence)
        finally:
            self._cancel([sequence])

    def _all_logits(self, ids: tuple[int, ...]) -> NDArray[np.float32]:
        logits = np.empty((len(ids), self.vocab_size), np.float32)
        end = 0
        for piece in self.stream_logits(ids):
            begin, end = end, end + len(piece)
            logits[begin:end] = piece
        return logits

    def _submit(self, sequences: abc.Sequence[Sequence]) -> None:
        engine = self._need_engine()
        for sequence in sequences:
            engine.submit(sequence)

    def _advance(self, sequence: Sequence) -> None:
        """Run one step of the engine, or wait for the steps that another thread runs until they reach `sequence`."""
        with self._turn:
            while self._is_stepping and not (sequence.has_results or sequence.is_finished):
                self._turn.wait()
            if sequence.has_results or sequence.is_finished:
                return
            engine = self._need_engine()
            self._is_stepping = True
        try:
            engine.step()
        finally:
            with self._turn:
                self._is_stepping = False
                self._turn.notify_all()

    def _cancel(self, sequences: abc.Sequence[Sequence]) -> None:
        """Free the places of sequences that have not ended, now or with the next step.

        It never waits: the garbage collector may call it, by way of a dropped stream, in the middle of a step.
        """
        engine = self._engine
        unfinished = [sequence for sequence in sequences if not sequence.is_finished]
        if engine is None or not unfinished:
            return
        engine.cancellations.extend(unfinished)
        if self._turn.acquire(blocking=False):
            try:
                if not self._is_stepping:
                    engine.drop_cancelled()
            finally:
                self._turn.release()

    def _need_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LanguageModel is closed; load the bundle again")
        return self._engine


def _params_for_each(
    params: SamplingParams | abc.Sequence[SamplingParams] | None, count: int
) -> abc.Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, str) or not isinstance(params, abc.Sequence):
        raise TypeError(f"params must be SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != count:
        raise ValueError(f"{len(params)} SamplingParams for {count} prompts; give one for all, or one a prompt")
    return params


def _raise_error(sequence: Sequence) -> None:
    if sequence.error is not None:
        raise sequence.error
