"""A bundle opened for use: text or ids in, text and ids out, whole or streamed, many requests at a time.

In: prompts and SamplingParams. Out: `GenerationOutput`s, `StreamEvent`s, logits. It checks every request before
anything runs; choosing tokens and batching are done by `sampling.py` and `engine.py`.

Limits: prompt + new tokens <= max_length. A prompt of exactly max_length tokens is allowed and gets no new token. Where
max_new_tokens would go beyond, generation ends at max_length; both end with reason "length".
"""

import logging
import os
import threading
import time
from collections import abc
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import KIND_WORDS
from graphport.runtime.background import Background
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.cuda_setup import GraphWish
from graphport.runtime.device import Device, DeviceWish, PrefillProducts
from graphport.runtime.draft_sources import check_drafts, speculation_source
from graphport.runtime.engine import Engine
from graphport.runtime.engine_statistics import EngineStatistics, engine_statistics
from graphport.runtime.generation_output import GenerationOutput, generation_output, kept_state
from graphport.runtime.intake import Intake, Prompt
from graphport.runtime.limits import MOST_ROWS, checked_count
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.prefill_products import default_chunk
from graphport.runtime.prefix_cache import checked_prefix_budget
from graphport.runtime.request import Request
from graphport.runtime.request_options import RequestArguments, RequestOptions
from graphport.runtime.resident_memory import return_freed
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.sequence import StreamEvent
from graphport.runtime.sequence_state import ModelIdentity, SequenceState, read_state
from graphport.runtime.session import Session
from graphport.runtime.tokenizer import Tokenizer
from graphport.runtime.turns import Turns
from graphport.runtime.usual_use import usual_use

DECODER_BATCH = 8
_PARSE_SECONDS = 0.02  # of a graph of 800 nodes, which is parsed in 7 ms

_log = logging.getLogger(__name__)


class LanguageModel:
    """An open bundle. Methods may be called from several threads: their requests share the batch (see `turns.py`).

    Attributes: `device`, `device_id`, `provider_options` (those that CUDA took), `memory_plan`, `threads`,
    `is_prepared`, `prefill_products`, `prefill_chunk`,
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
        prefill_chunk: int | None = None,
        prefix_cache_bytes: int = 0,
        prompt_lookup: bool = False,
        draft: str | os.PathLike[str] | None = None,
        cuda_graphs: GraphWish = "auto",
        stream: int | None = None,
        spinning: bool = True,
        prepared: bool = True,
        prefill_products: PrefillProducts = "as_exported",
    ) -> None:
        if bundle.manifest.kind not in ("decoder", "encoder_decoder"):
            why = "which continues no text"
            if bundle.manifest.kind == "recurrent_decoder":
                why = "whose states no KV cache holds"
            what, use = KIND_WORDS[bundle.manifest.kind], usual_use(bundle.manifest)
            raise ValueError(f"{bundle.folder} is {what}, {why}; use load, and {use}")
        longest = bundle.manifest.max_length
        wish = longest if max_length is None else max_length
        self.max_length = checked_count("max_length", wish, most=longest, reason=", the bundle's own")
        chunk = default_chunk(bundle.manifest.target, prefill_products) if prefill_chunk is None else prefill_chunk
        limits = RunLimits(
            max_batch=checked_count("max_batch", max_batch, most=MOST_ROWS),
            max_length=self.max_length,
            prefill_chunk=checked_count("prefill_chunk", chunk),
        )
        checked_prefix_budget(prefix_cache_bytes)
        if bundle.encoder is not None:
            cuda_graphs = _without_reuse(
                cuda_graphs, prefix_cache_bytes=prefix_cache_bytes, prompt_lookup=prompt_lookup, draft=draft
            )
        check_drafts(draft, prompt_lookup=prompt_lookup)
        self.manifest = bundle.manifest
        checked = threading.Event()
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
                spinning=spinning,
                prepared=prepared,
                prefill_products=prefill_products,
                on_checked=checked.set,
            )
            opening.add_done_callback(lambda _: checked.set())  # it may fail before
            self.tokenizer: Tokenizer | None = None
            if bundle.has_tokenizer:
                # Reading one never gives up Python's lock, opening a session does once the graph is parsed.
                checked.wait()
                time.sleep(_PARSE_SECONDS)
                self.tokenizer = Tokenizer.load(bundle.folder)
            session = opening.result()
        return_freed()  # what reading the tokenizer took
        self.vocab_size = session.vocab_size
        self.threads = session.threads
        self.is_prepared, self.prefill_products = session.is_prepared, session.prefill_products
        self.prefill_chunk = limits.prefill_chunk
        self.device: Device = session.device
        self.device_id = session.device_id
        self.provider_options = session.provider_options
        self.memory_plan = session.memory_plan
        engine = Engine(
            session,
            max_batch=limits.max_batch,
            max_length=self.max_length,
            prefill_chunk=limits.prefill_chunk,
            prefix_cache_bytes=prefix_cache_bytes,
        )
        self._intake = Intake(
            bundle.manifest,
            self.tokenizer,
            identity=ModelIdentity.of(
                bundle.manifest,
                is_prepared=session.is_prepared,
                prefill_products=session.prefill_products,
                chunk=engine.reused_chunk,
            ),
            max_length=self.max_length,
            max_batch=limits.max_batch,
            new_speculation=speculation_source(
                session, self.tokenizer, draft=draft, prompt_lookup=prompt_lookup, max_length=self.max_length
            ),
        )
        self._turns = Turns(engine)

    def generate(
        self,
        prompts: abc.Sequence[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestArguments],
    ) -> list[GenerationOutput]:
        """Continue every prompt, a str or a list of ids; outputs in the order of the prompts.

        params: one for all, or one a prompt. options: see `RequestOptions`. All prompts are checked before any runs.
        Raises TypeError and ValueError for requests, NotEnoughMemoryError for one whose rows could never fit (one that
        fits later waits), NonFiniteLogitsError when the model overflows; no request of the call goes on after an error.
        """
        requests = self._intake.generations(prompts, params, RequestOptions(**options))
        self._turns.admit(requests)
        self._turns.run(requests)
        return [generation_output(request.outputs, self._intake.identity) for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestArguments],
    ) -> abc.Iterator[StreamEvent]:
        """Continue one prompt, token by token; the texts of the events join to the text of `generate`.

        The events of several samples (`SamplingParams.n`) come as they are computed, with the sample's `index`.
        options: see `RequestOptions`. The request is checked now and starts when first iterated. Closing the iterator,
        or dropping it, cancels the request and frees its place in the batch. Raises ValueError for beam search, whose
        text is not known before its end.
        """
        if params is not None and params.num_beams > 1:
            raise ValueError("beam search cannot be streamed: its text is known at its end; use generate")
        return self._turns.results(self.request(prompt, params, **options))

    def request(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestArguments]
    ) -> Request[StreamEvent]:
        """A checked request, which `background` can run. Raises as `generate` does; a time-out begins now."""
        checked = RequestOptions(**options)
        request = self._intake.generation(prompt, params or SamplingParams(), checked, name="prompt")
        self._turns.admit([request])
        return request

    def background(self) -> Background:
        """A thread that runs requests and hands over what they bring; close it before the model."""
        return Background(self._turns)

    def chat(
        self,
        messages: abc.Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        **options: Unpack[RequestArguments],
    ) -> abc.Iterator[StreamEvent]:
        """Stream the answer to `messages` ({"role": ..., "content": ...}), rendered by the bundle's chat template.

        options: those of `stream`.
        """
        if self.manifest.kind == "encoder_decoder":
            raise ValueError("chat is for decoders; this model reads a source: use generate or stream")
        return self.stream(self._intake.need_tokenizer("chat").apply_chat_template(messages), params, **options)

    def logits(self, prompts: abc.Sequence[abc.Sequence[int] | NDArray[np.integer[Any]]]) -> list[NDArray[np.float32]]:
        """Logits [len, vocab] of every position of each list of ids, through the cache path."""
        if isinstance(prompts, str) or not isinstance(prompts, abc.Sequence):
            raise TypeError(f"logits takes a list of lists of ids, got {type(prompts).__name__}")
        checked = [self._intake.checked_ids(ids, f"prompt {i}") for i, ids in enumerate(prompts)]
        return [self._all_logits(ids) for ids in checked]

    def stream_logits(
        self, ids: abc.Sequence[int] | NDArray[np.integer[Any]], *, first_row: int = 0
    ) -> abc.Iterator[NDArray[np.float32]]:
        """Logits [n, vocab] of the positions of `ids` from `first_row` on, in pieces that are the caller's own.

        A piece is at most 64 MiB or one row, and the next is computed when it is asked for (or by another thread's
        steps). Raises as `generate` does.
        """
        return self._turns.results(self._intake.scoring(ids, first_row=first_row, name="ids"))

    def prefill(self, prompt: Prompt, *, state: SequenceState | None = None) -> SequenceState:
        """Run a prompt, a str or a list of ids, and return the rows that it leaves in the cache.

        Requests that get it as `state` skip what their prompts share with it. state: rows known already. Raises as
        `generate` does.
        """
        ids = self._intake.prompt_ids(prompt, "prompt")
        request = self._intake.scoring(ids, first_row=None, name="prompt", state=state, keeps_state=True)
        self._turns.admit([request])
        self._turns.run([request])
        kept = kept_state(request.sequences[0], self._intake.identity)
        assert kept is not None
        return kept

    def restore(self, path: str | os.PathLike[str]) -> SequenceState:
        """Read a state that `SequenceState.save` wrote.

        Raises ValueError for a file that is torn, or of another kind, version or model; OSError if there is none.
        """
        specs = self._turns.need_engine().cache.specs
        return read_state(path, model=self._intake.identity, specs=specs, vocab_size=self.vocab_size)

    def close(self) -> None:
        """Give the session and the cache back; running requests end as cancelled, later ones raise."""
        self._turns.close()
        self._intake.close()

    def __enter__(self) -> "LanguageModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _engine(self) -> Engine | None:
        return self._turns.engine

    @property
    def num_active(self) -> int:
        """Requests that hold a place in the batch now."""
        return 0 if self._engine is None else self._engine.scheduler.num_active

    @property
    def cuda_graphs(self) -> bool:
        """Whether decode steps are captured as CUDA graphs and replayed."""
        return self._engine is not None and self._engine.session.cuda_graphs

    @property
    def statistics(self) -> EngineStatistics:
        """Requests, tokens, reuse since the bundle was opened. Raises RuntimeError once it is closed."""
        return engine_statistics(self._turns.need_engine())

    @property
    def cache_bytes(self) -> int:
        """Bytes that the KV cache takes now."""
        cache = None if self._engine is None else self._engine.cache
        return 0 if cache is None else cache.bytes_for(cache.num_slots, cache.capacity)

    def _all_logits(self, ids: tuple[int, ...]) -> NDArray[np.float32]:
        logits = np.empty((len(ids), self.vocab_size), np.float32)
        end = 0
        for piece in self.stream_logits(ids):
            begin, end = end, end + len(piece)
            logits[begin:end] = piece
        return logits


def _without_reuse(
    cuda_graphs: GraphWish, *, prefix_cache_bytes: int, prompt_lookup: bool, draft: str | os.PathLike[str] | None
) -> GraphWish:
    """What an encoder-decoder does of `cuda_graphs`: none. Raises ValueError for options that need a decoder alone."""
    given = {
        "prefix_cache_bytes": prefix_cache_bytes != 0,
        "prompt_lookup": prompt_lookup,
        "draft": draft is not None,
        "cuda_graphs": cuda_graphs not in ("auto", False),
    }
    names = " and ".join(name for name, is_given in given.items() if is_given)
    if names:
        raise ValueError(f"{names} cannot be heeded by an encoder-decoder; leave it out")
    return False
