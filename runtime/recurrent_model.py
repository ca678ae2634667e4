"""A recurrent decoder's bundle opened for use: prompts in, new tokens out; or step by step, with states in and out.

In: prompts of any lengths; or ids of texts of one length and the state after those before them. Out: as of a
`LanguageModel`; or logits float32 and the state after them. Legend: B rows, S new tokens, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.certified_inputs import Row
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.device import DeviceWish
from graphport.runtime.encoder_session import EncoderSession
from graphport.runtime.generation_output import GenerationOutput, generation_output
from graphport.runtime.intake import Intake, Prompt
from graphport.runtime.open_encoder import OpenEncoder, require_finite
from graphport.runtime.recurrent_engine import RecurrentEngine
from graphport.runtime.recurrent_steps import empty_tensors, run_step
from graphport.runtime.request import Request
from graphport.runtime.request_options import RequestArguments, RequestOptions
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.sequence import StreamEvent
from graphport.runtime.sequence_state import ModelIdentity
from graphport.runtime.tokenizer import Tokenizer
from graphport.runtime.turns import Turns


class RecurrentState(NamedTuple):
    """What `length` tokens of each of B texts leave: products [B, N, H, H] and keys [B, N, H] of layer 0, 1, ..."""

    length: int
    tensors: tuple[NDArray[np.float32], ...]


class RecurrentModel(OpenEncoder):
    """An open recurrent decoder; attributes as of `OpenEncoder`, and `tokenizer`, None if the bundle has none."""

    def __init__(
        self,
        bundle: BundleFiles,
        *,
        device: DeviceWish,
        device_id: int,
        provider_options: Mapping[str, OptionValue] | None,
        max_batch: int,
        max_length: int | None,
        threads: int | None,
        stream: int | None,
        strict: bool,
    ) -> None:
        super().__init__(
            bundle,
            max_batch=max_batch,
            device=device,
            device_id=device_id,
            provider_options=provider_options,
            max_length=max_length,
            threads=threads,
            stream=stream,
            strict=strict,
        )
        self.tokenizer = Tokenizer.load(bundle.folder) if bundle.has_tokenizer else None
        self._intake = Intake(
            bundle.manifest,
            self.tokenizer,
            identity=ModelIdentity.of(bundle.manifest, is_prepared=False, prefill_products="as_exported", chunk=None),
            max_length=self.max_length,
            max_batch=self.max_batch,
        )
        vocab_size = self.manifest.config.vocab_size
        self._turns = Turns(RecurrentEngine(self._open_session(), max_batch=self.max_batch, vocab_size=vocab_size))

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestArguments],
    ) -> list[GenerationOutput]:
        """Continue every prompt, a list of ids, or a str if there is a tokenizer; see `LanguageModel.generate`.

        Prompts may differ in length; `max_batch` of them run together, each with a state of its own. Beam search,
        `state` and `keep_state` are refused.
        """
        requests = self._requests(prompts, params, RequestOptions(**options))
        self._turns.run(requests)
        return [generation_output(request.outputs, self._intake.identity) for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestArguments]
    ) -> Iterator[StreamEvent]:
        """Continue one prompt, token by token; see `LanguageModel.stream` and `generate`."""
        (request,) = self._requests([prompt], params, RequestOptions(**options))
        return self._turns.results(request)

    def _requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions,
    ) -> list[Request[StreamEvent]]:
        self._open_session()  # raises once it is closed
        if options.state is not None or options.keep_state:
            raise ValueError(
                "state and keep_state are rows of a KV cache; a recurrent decoder's states are those of step"
            )
        requests = self._intake.generations(prompts, params, options)
        if any(sequence.params.num_beams > 1 for request in requests for sequence in request.sequences):
            raise ValueError("beam search is not built for recurrent decoders; leave num_beams out, or give n samples")
        return requests

    def close(self) -> None:
        """Give the session back; running requests end as cancelled, later calls raise."""
        self._turns.close()
        super().close()

    def step(
        self, ids: Sequence[Sequence[int]] | NDArray[np.integer[Any]], state: RecurrentState | None = None
    ) -> tuple[NDArray[np.float32], RecurrentState]:
        """Logits [B, S, V] of new ids [B, S], and the state after them.

        `state`: what an earlier step gave for the same B texts, which it leaves as it is; None begins texts. Raises
        TypeError and ValueError for ids and states that do not fit, and FloatingPointError when the model overflows.
        """
        config = self.manifest.config
        try:
            array = np.asarray(ids)
        except ValueError:  # rows of several lengths
            array = np.empty(0)
        if array.ndim != 2 or not array.size or not np.issubdtype(array.dtype, np.integer):
            raise ValueError("ids must be whole numbers [rows, tokens], rows of one length and at least one token")
        if len(array) > self.max_batch:
            raise ValueError(f"{len(array)} rows are more than max_batch ({self.max_batch}) of load")
        if array.min() < 0 or array.max() >= config.vocab_size:
            raise ValueError(f"ids must lie in 0 .. {config.vocab_size - 1}, got {array.min()} .. {array.max()}")
        before = empty_state(self._open_session(), len(array))
        if state is not None:
            _require_state(state, like=before)
            before = state
        if before.length + array.shape[1] > self.max_length:
            raise ValueError(f"{before.length + array.shape[1]} tokens are more than max_length ({self.max_length})")
        logits, after = step(self._open_session(), array, before)
        require_finite(logits)
        return logits, after


def _require_state(state: object, *, like: RecurrentState) -> None:
    """Raise TypeError for what is no state, ValueError for one of another model or of other rows than `like`."""
    if not isinstance(state, RecurrentState):
        raise TypeError(f"state must be what an earlier step gave, or None; got a {type(state).__name__}")
    if isinstance(state.length, bool) or not isinstance(state.length, int) or state.length < 0:
        raise ValueError(f"the state's length must be a number of tokens, got {state.length!r}; give states unchanged")
    found, wanted = ([(np.shape(tensor)[1:], _kind(tensor)) for tensor in one.tensors] for one in (state, like))
    if found != wanted:
        raise ValueError("the state is not of this model: shapes or dtypes differ; give what its own step gave")
    rows, needed = ({len(tensor) for tensor in one.tensors} for one in (state, like))
    if rows != needed:
        raise ValueError(f"the state is of {min(rows - needed)} rows, ids have {min(needed)}")
    if not all(np.isfinite(tensor).all() for tensor in state.tensors):
        raise ValueError("the state has numbers that are not finite; begin the texts again")


def _kind(tensor: object) -> str:
    return str(tensor.dtype) if isinstance(tensor, np.ndarray) else type(tensor).__name__


class ServedRecurrent:
    """A `RecurrentTexts` of `encoder_runs.py` over the session that serves."""

    def __init__(self, session: EncoderSession) -> None:
        self._session = session

    def run_pieces(self, row: Row, pieces: Sequence[int]) -> NDArray[np.float32]:
        """See RecurrentTexts."""
        ids, found = np.array([row.ids], np.int64), []
        state = empty_state(self._session, 1)
        for size in (*pieces, ids.shape[1]):
            piece = ids[:, state.length : state.length + size]
            if piece.size:
                logits, state = step(self._session, piece, state)
                found.append(logits)
        return np.concatenate(found, axis=1)


def empty_state(session: EncoderSession, rows: int) -> RecurrentState:
    """The state of `rows` texts without a token."""
    return RecurrentState(0, empty_tensors(session, rows))


def step(
    session: EncoderSession, ids: NDArray[np.integer[Any]], state: RecurrentState
) -> tuple[NDArray[np.float32], RecurrentState]:
    """Logits [B, S, V] of new ids [B, S], and the state after them."""
    logits, after = run_step(session, ids, np.full(len(ids), state.length, np.int64), state.tensors)
    return logits, RecurrentState(state.length + ids.shape[1], after)
