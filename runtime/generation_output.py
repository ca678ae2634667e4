"""What a finished request became.

In: sequences that have ended. Out: their ids, text and reason as one record. It runs nothing.
"""

import dataclasses
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from graphport.runtime.beam_sequences import BeamSequence
from graphport.runtime.sampling import Sample
from graphport.runtime.sequence import FinishReason, Sequence
from graphport.runtime.sequence_state import ModelIdentity, SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """What one prompt became.

    `token_ids` are the new ids, an end id included; `text` is their text without end ids, cut before a stop string, and
    empty when the bundle has no tokenizer. `logprobs` has one Sample a new id if SamplingParams.logprobs asked for it.
    `prompt_logprobs` has a Sample for each prompt id but the first, for which it has None, if
    SamplingParams.prompt_logprobs asked for it; of several samples, the first output has it. `others` are samples 1 to
    n-1 of the same prompt (SamplingParams.n). `state`: of all ids that have run, which the last one has not, where it
    was asked for (`keep_state`) and anything ran. `source_token_ids`: what the encoder of an encoder-decoder read, of
    text; its prompt is what its decoder's text begins with. `score`: of beam search, by which the samples are in order.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[Sample, ...] | None = None
    prompt_logprobs: tuple[Sample | None, ...] | None = None
    others: tuple["GenerationOutput", ...] = ()
    state: SequenceState | None = field(default=None, compare=False, repr=False)
    source_token_ids: tuple[int, ...] | None = None
    score: float | None = None

    @property
    def samples(self) -> tuple["GenerationOutput", ...]:
        """All n samples: this one, and the others."""
        return (self, *self.others)


def generation_output(sequences: Many[Sequence], model: ModelIdentity) -> GenerationOutput:
    """The record of the samples of one prompt, which have ended without an error."""
    first, *others = (_record(sequence, model) for sequence in sequences)
    return dataclasses.replace(first, others=tuple(others))


def kept_state(sequence: Sequence, model: ModelIdentity) -> SequenceState | None:
    """The state of `sequence`, which has ended; None if none was asked for, or nothing ran."""
    kept = sequence.kept_rows
    if kept is None:
        return None
    length = kept.length
    return SequenceState(
        token_ids=(*sequence.prompt_ids.tolist(), *sequence.token_ids)[:length],
        rows=kept.rows,
        firsts=kept.firsts,
        num_prompt_tokens=min(length, len(sequence.prompt_ids)),
        model=model,
    )


def _record(sequence: Sequence, model: ModelIdentity) -> GenerationOutput:
    assert sequence.finish_reason is not None
    return GenerationOutput(
        text=sequence.text,
        token_ids=tuple(sequence.token_ids),
        finish_reason=sequence.finish_reason,
        prompt_token_ids=tuple(sequence.prompt_ids.tolist()),
        logprobs=None if sequence.params.logprobs is None else tuple(sequence.samples),
        prompt_logprobs=None if sequence.first_row is None else (None, *sequence.prompt_samples),
        state=kept_state(sequence, model),
        source_token_ids=sequence.source if isinstance(sequence.source, tuple) else None,
        score=sequence.score if isinstance(sequence, BeamSequence) else None,
    )
