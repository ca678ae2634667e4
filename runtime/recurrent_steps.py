"""One step of a recurrent decoder's graph: ids and states in, logits and states out.

In: an open session, ids [B, S], how many tokens each row's state holds. Out: logits [B, S, V], the states after them.
It keeps nothing and chooses nothing. Legend: B rows, S new tokens, N heads, H head size, V vocabulary.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.recurrent_signature import NUM_PAST
from graphport.model_def.signature import INPUT_IDS
from graphport.runtime.encoder_session import EncoderSession

# products [B, N, H, H] and keys [B, N, H] of layer 0, 1, ...
Tensors = tuple[NDArray[np.float32], ...]


def empty_tensors(session: EncoderSession, rows: int) -> Tensors:
    """The states of `rows` texts without a token."""
    specs = [spec for spec in session.signature.inputs if spec.name not in (INPUT_IDS, NUM_PAST)]
    shapes = [tuple(size for size in spec.shape if isinstance(size, int)) for spec in specs]
    return tuple(np.zeros((rows, *shape), np.float32) for shape in shapes)


def run_step(
    session: EncoderSession, ids: NDArray[np.integer[Any]], lengths: NDArray[np.int64], tensors: Tensors
) -> tuple[NDArray[np.float32], Tensors]:
    """Logits [B, S, V] of new ids [B, S] behind `lengths` [B] tokens, and the states after them."""
    names = [spec.name for spec in session.signature.inputs if spec.name not in (INPUT_IDS, NUM_PAST)]
    feed = dict(zip(names, tensors, strict=True))
    logits, *after = session.run_feed({INPUT_IDS: ids.astype(np.int64), NUM_PAST: lengths, **feed})
    return logits, tuple(after)
