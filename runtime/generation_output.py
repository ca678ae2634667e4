"""What a finished request became.

In: sequences that have ended. Out: their ids, text and reason as one record. It runs nothing.
"""

import dataclasses
from collections.abc import Sequence as Many
from dataclasses import dataclass

from graphport.runtime.sampling import Sample
from graphport.runtime.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """What one prompt became.

    `token_ids` are the new ids, an end id included; `text` is their text without end ids, cut before a stop string, and
    empty when the bundle has no tokenizer. `logprobs` has one Sample a new id if SamplingParams.logprobs asked for it.
    `others` are samples 1 to n-1 of the same prompt (SamplingParams.n).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[Sample, ...] | None = None
    others: tuple["GenerationOutput", ...] = ()

    @property
    def samples(self) -> tuple["GenerationOutput", ...]:
        """All n samples: this one, and the others."""
        return (self, *self.others)


def generation_output(sequences: Many[Sequence]) -> GenerationOutput:
    """The record of the samples of one prompt, which have ended without an error."""
    first, *others = sequences
    return dataclasses.replace(_record(first), others=tuple(_record(other) for other in others))


def _record(sequence: Sequence) -> GenerationOutput:
    assert sequence.finish_reason is not None
    return GenerationOutput(
        text=sequence.text,
        token_ids=tuple(sequence.token_ids),
        finish_reason=sequence.finish_reason,
        prompt_token_ids=tuple(sequence.prompt_ids.tolist()),
        logprobs=None if sequence.params.logprobs is None else tuple(sequence.samples),
    )
