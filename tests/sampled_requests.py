"""Requests of every kind of sampling, run on an engine, and compared.

In: sessions of one set of weights. Out: finished sequences, or an AssertionError where two differ.
"""

from parity import TOLERANCES
from tiny_bundles import VOCAB
from tiny_requests import random_ids

from graphport.runtime.engine import Engine
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.sequence import Sequence
from graphport.runtime.session import Session

TOLERANCE = TOLERANCES["tiny bundle", "float32"]
GREEDY = SamplingParams(temperature=0.0)

MIXED = (
    GREEDY,
    SamplingParams(temperature=0.8, top_k=5, seed=1),
    SamplingParams(temperature=1.0, top_p=0.7, seed=2),
    SamplingParams(temperature=1.2, min_p=0.2, seed=3, logprobs=3),
    SamplingParams(seed=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=5),
    SamplingParams(temperature=0.9, top_p=0.95, presence_penalty=0.5, seed=6),
)


def request(prompt: list[int], new: int, params: SamplingParams = GREEDY) -> Sequence:
    return Sequence(tuple(prompt), params, vocab_size=VOCAB, max_total=len(prompt) + new)


def mixed_requests(count: int) -> list[Sequence]:
    """Prompts and answers of all lengths, so that rows join and leave a batch at every step."""
    return [request(random_ids(1 + 7 * i % 40, i), 3 + 5 * i % 23, MIXED[i % len(MIXED)]) for i in range(count)]


def engine_with(session: Session, *sequences: Sequence, max_batch: int = 4) -> Engine:
    engine = Engine(session, max_batch=max_batch, max_length=128, prefill_chunk=16)
    for sequence in sequences:
        engine.submit(sequence)
    return engine


def run(session: Session, *sequences: Sequence, max_batch: int = 4) -> None:
    engine = engine_with(session, *sequences, max_batch=max_batch)
    while engine.all_sequences():
        engine.step()


def assert_same(found: Sequence, expected: Sequence) -> None:
    assert found.error is None
    assert found.token_ids == expected.token_ids
    for one, other in zip(found.samples, expected.samples, strict=True):
        assert abs(one.logprob - other.logprob) < TOLERANCE
        assert [id_ for id_, _ in one.top_logprobs] == [id_ for id_, _ in other.top_logprobs]
