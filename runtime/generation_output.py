"""What a finished request became.

In: a sequence that has ended. Out: its ids, text and reason as one record. It runs nothing.
"""

from dataclasses import dataclass

from graphport.runtime.sampling import Sample
from graphport.runtime.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """What one prompt became.

    `token_ids` are the new ids, an end id included; `text` is their text without end ids, cut before a stop string, and
    empty when the bundle has no tokenizer. `logprobs` has one Sample a new id if SamplingParams.logprobs asked for it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[Sample, ...] | None = None


def generation_output(sequence: Sequence) -> GenerationOutput:
    """The record of `sequence`, which has ended without an error."""
    assert sequence.finish_reason is not None
    return GenerationOutput(
        text=sequence.text,
        token_ids=tuple(sequence.token_ids),
        finish_reason=sequence.finish_reason,
        prompt_token_ids=tuple(sequence.prompt_ids.tolist()),
        logprobs=None if sequence.params.logprobs is None else tuple(sequence.samples),
    )
