"""Random logits, samplers over them, and what they draw, for the sampling tests.

In: seeds and parameters. Out: rows of logits, samplers, ids. It checks nothing.
"""

import numpy as np
import torch

from graphport.runtime.sampling import Sampler, SamplingParams

VOCAB = 37


def random_logits(seed: int, size: int = VOCAB, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, size).astype(np.float32)


def sampler(prompt: tuple[int, ...] = (), vocab: int = VOCAB, **params: object) -> Sampler:
    return Sampler(SamplingParams(**params), prompt, vocab_size=vocab)


def drawn(logits: np.ndarray, count: int, prompt: tuple[int, ...] = (), **params: object) -> list[int]:
    one = sampler(prompt, vocab=len(logits), **params)
    return [one.sample(logits).token_id for _ in range(count)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).double().log_softmax(0).numpy()
