"""A recurrent decoder's bundle opened for use: ids and states in, logits and states out.

In: ids of texts of one length, the state after those before them. Out: logits float32, the state after them. It
samples nothing, batches nothing and keeps no state: whoever steps does. Legend: B rows, S new tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.certified_inputs import Row
from graphport.model_def.recurrent_signature import NUM_PAST
from graphport.model_def.signature import INPUT_IDS
from graphport.runtime.encoder_session import EncoderSession
from graphport.runtime.open_encoder import OpenEncoder, require_finite


class RecurrentState(NamedTuple):
    """What `length` tokens of each of B texts leave: products [B, N, H, H] and keys [B, N, H] of layer 0, 1, ..."""

    length: int
    tensors: tuple[NDArray[np.float32], ...]


class RecurrentModel(OpenEncoder):
    """An open recurrent decoder; attributes as of `OpenEncoder`."""

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
    specs = [spec for spec in session.signature.inputs if spec.name not in (INPUT_IDS, NUM_PAST)]
    shapes = [tuple(size for size in spec.shape if isinstance(size, int)) for spec in specs]
    return RecurrentState(0, tuple(np.zeros((rows, *shape), np.float32) for shape in shapes))


def step(
    session: EncoderSession, ids: NDArray[np.integer[Any]], state: RecurrentState
) -> tuple[NDArray[np.float32], RecurrentState]:
    """Logits [B, S, V] of new ids [B, S], and the state after them."""
    names = [spec.name for spec in session.signature.inputs if spec.name not in (INPUT_IDS, NUM_PAST)]
    feed = dict(zip(names, state.tensors, strict=True))
    logits, *after = session.run_feed(
        {INPUT_IDS: ids.astype(np.int64), NUM_PAST: np.full(len(ids), state.length, np.int64), **feed}
    )
    return logits, RecurrentState(state.length + ids.shape[1], tuple(after))
