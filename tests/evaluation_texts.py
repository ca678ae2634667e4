"""Texts of ids for the evaluation tests, and the log-probabilities that their figures are made of.

In: ids, or a length; logits. Out: texts, arrays. It runs no model.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny_bundles import VOCAB

from graphport.runtime.evaluation_text import EvaluationText


def ids_text(*ids: int, prefix: tuple[int, ...] = ()) -> EvaluationText:
    return EvaluationText(ids=np.array(ids, np.int64), prefix_ids=prefix)


def random_text(length: int) -> EvaluationText:
    return ids_text(*np.random.default_rng(length).integers(0, VOCAB, length).tolist())


def log_softmax(logits: NDArray[Any]) -> NDArray[Any]:
    top = logits.max(-1, keepdims=True)
    normal: NDArray[Any] = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return normal
