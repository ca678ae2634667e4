"""Prompts and parameters for tests of an open tiny bundle.

In: lengths and seeds. Out: ids, SamplingParams, the number of steps a model has run. It checks nothing.
"""

from typing import Any

import numpy as np
from tiny_bundles import VOCAB

from graphport.runtime import LanguageModel, SamplingParams

P8 = (1, 2, 3, 5, 8, 13, 21, 34)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()  # type: ignore[no-any-return]


def greedy(new: int | None = 8, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=0.0, **options)


def seeded(seed: int | None, new: int = 10) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=1.5, seed=seed)


def num_steps(model: LanguageModel) -> int:
    assert model._engine is not None
    return model._engine.num_steps
