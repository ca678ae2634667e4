"""Eager PyTorch as the model that a bundle is evaluated against.

In: what the user names as SOURCE. Out: logits of any text, some rows at a time. It compares nothing.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from graphport.export.source import SourceModel, open_source
from graphport.export.targets import TargetError
from graphport.model_def.transformer import Transformer

_PIECE_BYTES = 1 << 26


class EagerReference:
    """A source's module; `vocab_size` and `max_length` are its own, `tokenizer_json` and `notes` came with it."""

    def __init__(self, opened: SourceModel) -> None:
        self._model: Transformer = opened.model
        self.vocab_size = opened.model.config.vocab_size
        self.max_length = opened.model.config.max_positions
        self.tokenizer_json = opened.tokenizer_json
        self.notes = opened.notes

    def stream_logits(self, ids: Sequence[int], *, first_row: int = 0) -> Iterator[NDArray[np.float32]]:
        """Logits [n, V] of the positions of `ids` from `first_row` on, in pieces of at most 64 MiB or one row.

        The blocks run over the whole text at once, without a cache. Raises ValueError for logits that are not finite.
        """
        with torch.inference_mode():
            hidden = self._model.run_blocks(torch.tensor([list(ids)]))[0, first_row:]  # [n, W]
        for rows in torch.split(hidden, max(1, _PIECE_BYTES // (4 * self.vocab_size))):
            with torch.inference_mode():
                logits = self._model.read_out(rows).to(torch.float32)
            if not logits.isfinite().all():
                raise ValueError("logits of the source are not finite: it cannot serve as a reference")
            yield logits.numpy()


def open_reference(source: str) -> EagerReference:
    """Open SOURCE for its logits; a function's configuration gets the weights of seed 0, as an export does.

    Raises CheckpointError for what cannot be read, TargetError for a model that does not predict the next token.
    """
    opened = open_source(source, seed=0)
    config = opened.model.config
    if not config.is_decoder or config.head == "none":
        raise TargetError(f"{source} is an encoder: it predicts no next token, so there is nothing to compare")
    return EagerReference(opened)
