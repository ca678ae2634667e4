"""What callers ask for, checked against the model and made into requests.

In: prompts, SamplingParams, options. Out: `Request`s, or an error in one line before anything runs. It runs nothing.
"""

import functools
from collections import abc, deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import Manifest
from graphport.runtime.audio_features import Features
from graphport.runtime.beam_search import BeamSearch
from graphport.runtime.beam_sequences import BeamGroup, BeamSequence
from graphport.runtime.constraints import Grammars
from graphport.runtime.diverse_beams import DiverseBeamSearch
from graphport.runtime.field_error import FieldError
from graphport.runtime.logit_edits import new_edits
from graphport.runtime.prompts import checked_prompt_ids
from graphport.runtime.recordings import Recording
from graphport.runtime.request import Request
from graphport.runtime.request_options import RequestOptions
from graphport.runtime.sampling_params import SamplingParams
from graphport.runtime.sequence import ScoringSequence, Sequence, StreamEvent
from graphport.runtime.sequence_state import ModelIdentity, SequenceState
from graphport.runtime.source_prompts import SourcePrompt, SourcePrompts, need_forced, rules_of
from graphport.runtime.speculation import Speculation
from graphport.runtime.speech_prompts import SpeechPrompts
from graphport.runtime.tokenizer import Tokenizer

Prompt = str | abc.Sequence[int] | NDArray[np.integer[Any]] | Recording | Features


class Intake:
    """Makes requests for one open model, which has `max_batch` places; `tokenizer` is None if the bundle has none.

    `new_speculation` makes what drafts for a sequence.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer | None,
        *,
        identity: ModelIdentity,
        max_length: int,
        max_batch: int,
        new_speculation: Callable[[], Speculation] | None = None,
    ) -> None:
        self.identity = identity
        self._manifest = manifest
        self._tokenizer = tokenizer
        self._vocab_size = manifest.config.vocab_size
        self._max_length = max_length
        self._max_batch = max_batch
        self._new_speculation = new_speculation
        self._reads_source = manifest.config.encoder is not None
        self._grammars: Grammars | None = None
        if tokenizer is not None:
            ends = manifest.generation.eos_token_ids
            self._grammars = Grammars(tokenizer, vocab_size=manifest.config.vocab_size, end_ids=ends)

    def generations(
        self,
        prompts: abc.Sequence[Prompt],
        params: SamplingParams | abc.Sequence[SamplingParams] | None,
        options: RequestOptions,
    ) -> list[Request[StreamEvent]]:
        """A request for each prompt; `params` are one for all, or one a prompt. Raises TypeError and ValueError."""
        if isinstance(prompts, str) or not isinstance(prompts, abc.Sequence):
            raise TypeError(
                f"prompts must be a list of str or of lists of ids, got {type(prompts).__name__}; use [prompt]"
            )
        each = _params_for_each(params, len(prompts))
        return [
            self.generation(prompt, one, options, name=f"prompt {i}")
            for i, (prompt, one) in enumerate(zip(prompts, each, strict=True))
        ]

    def generation(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, *, name: str
    ) -> Request[StreamEvent]:
        """A request for the samples of one prompt, which errors call `name`. Raises TypeError and ValueError."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
        for field, is_asked in (
            ("stop", params.stop),
            ("bad_words", params.bad_words),
            (params.constraint or "", params.constraint),
        ):
            if is_asked:
                self.need_tokenizer(field, field=field)
        source = self._source(prompt, options, name)
        ids = self.prompt_ids(prompt, name) if source is None else self.checked_ids(source.decoder_ids, name)
        self._check_state(options.state)
        self._check_places(params, name)
        own_ends = () if params.ignore_eos else self._manifest.generation.eos_token_ids
        new = self._max_length if params.max_new_tokens is None else params.max_new_tokens
        max_total = min(self._max_length, len(ids) + new)
        forced = None
        if source is not None:
            forced = rules_of(source, need_forced(self._manifest), params, most=max_total - len(ids))
        bad_ids = self._bad_ids(params.bad_words)
        constraint = None if self._grammars is None else self._grammars.constraint(params)
        drafts = self._new_speculation if options.speculate and params.num_beams == 1 else None
        events: deque[StreamEvent] = deque()
        make = Sequence if params.num_beams == 1 else BeamSequence
        sequences = [
            make(
                ids,
                params,
                vocab_size=self._vocab_size,
                max_total=max_total,
                end_ids=frozenset(own_ends) | frozenset(params.stop_token_ids),
                text_stream=None if self._tokenizer is None else self._tokenizer.stream(),
                num_text_ids=0 if self._tokenizer is None else self._tokenizer.vocab_size,
                index=index,
                events=events,
                priority=options.priority,
                deadline=options.deadline,
                state=options.state,
                keeps_state=options.keep_state,
                speculation=None if drafts is None else drafts(),
                bad_ids=bad_ids,
                constraint=None if constraint is None else constraint.copy(),
                forced=forced,
                source=None if source is None else source.source,
                languages=() if source is None else source.languages,
            )
            for index in range(max(params.n, params.num_beams))
        ]
        if params.num_beams > 1:
            most, vocab_size = max_total - len(ids), self._vocab_size
            prompt_ids = sequences[0].prompt_ids
            BeamGroup(
                [sequence for sequence in sequences if isinstance(sequence, BeamSequence)],
                self._search(params, frozenset(own_ends), most),
                lambda: new_edits(params, prompt_ids, vocab_size=vocab_size, bad_ids=bad_ids, forced=forced),
            )
        return Request(sequences, events, num_outputs=params.n)

    def _search(self, params: SamplingParams, end_ids: frozenset[int], most: int) -> BeamSearch | DiverseBeamSearch:
        num_end_ids = len(end_ids)
        if max(2, 1 + num_end_ids) * params.num_beams > self._vocab_size:
            raise ValueError(
                f"num_beams={params.num_beams} is more than a vocabulary of {self._vocab_size} ids has candidates for; "
                "give fewer"
            )
        groups = [
            BeamSearch(
                num_beams=params.num_beams // params.num_beam_groups,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                end_ids=end_ids,
                num_end_ids=num_end_ids,
                most=most,
            )
            for _ in range(params.num_beam_groups)
        ]
        return groups[0] if len(groups) == 1 else DiverseBeamSearch(groups, penalty=params.diversity_penalty)

    def _check_places(self, params: SamplingParams, name: str) -> None:
        for field, what in (("n", f"n={params.n} samples"), ("num_beams", f"num_beams={params.num_beams}")):
            if getattr(params, field) > self._max_batch:
                raise FieldError(
                    f"{name} asks for {what}, which need as many places in the batch; there are {self._max_batch}: "
                    "load the bundle with a larger max_batch, or give the prompt several times",
                    field=field,
                )

    @functools.cached_property
    def _sources(self) -> SourcePrompts | SpeechPrompts:
        """Raises ValueError when the bundle does not say how a text begins."""
        encoder = self._manifest.config.encoder
        hears = encoder is not None and encoder.audio is not None
        return SpeechPrompts(self._manifest) if hears else SourcePrompts(self._manifest)

    def _source(self, prompt: Prompt, options: RequestOptions, name: str) -> SourcePrompt | None:
        """The prompt as an encoder-decoder takes it, None where it is a decoder's own."""
        if not self._reads_source:
            for option in ("language", "source_language", "task", "timestamps"):
                if getattr(options, option) is not None:
                    raise ValueError(f"{option} is for models that read a source, and this one continues its prompt")
            return None
        if options.state is not None or options.keep_state:
            raise ValueError("state and keep_state are for decoders: rows of an encoder-decoder belong to one source")
        sources = self._sources
        if isinstance(sources, SpeechPrompts):
            return sources.prompt(prompt, options, name)
        is_text = isinstance(prompt, str)
        ids = self.need_tokenizer("a str prompt").encode(str(prompt)) if is_text else prompt
        return sources.prompt(ids, options, name, is_empty=is_text and not str(prompt).strip())

    def scoring(
        self,
        ids: object,
        *,
        first_row: int | None,
        name: str,
        state: SequenceState | None = None,
        keeps_state: bool = False,
    ) -> Request[NDArray[np.float32]]:
        """A request for the logits of the positions of `ids` from `first_row` on, by default of the last alone."""
        if self._reads_source:
            raise ValueError("logits and states of a text alone are a decoder's; this model reads a source first")
        checked = self.checked_ids(ids, name)
        self._check_state(state)
        if first_row is not None and not 0 <= first_row < len(checked):
            raise ValueError(f"first_row must be 0 to {len(checked) - 1}, the last position; got {first_row}")
        sequence = ScoringSequence(
            checked,
            vocab_size=self._vocab_size,
            first_row=len(checked) - 1 if first_row is None else first_row,
            state=state,
            keeps_state=keeps_state,
        )
        return Request([sequence], sequence.pieces)

    def prompt_ids(self, prompt: Prompt, name: str) -> tuple[int, ...]:
        """Ids of a prompt, a str or a list of ids."""
        encoded = self.need_tokenizer("a str prompt").encode(prompt) if isinstance(prompt, str) else prompt
        return self.checked_ids(encoded, name)

    def checked_ids(self, ids: object, name: str) -> tuple[int, ...]:
        """See `checked_prompt_ids`."""
        return checked_prompt_ids(ids, name, vocab_size=self._vocab_size, max_length=self._max_length)

    def need_tokenizer(self, what: str, *, field: str = "prompt") -> Tokenizer:
        """The tokenizer. Raises FieldError, saying that `what` needs one, if the bundle has none."""
        if self._tokenizer is None:
            raise FieldError(
                f"{what} needs a tokenizer, which this bundle does not have; give prompts as lists of ids", field=field
            )
        return self._tokenizer

    def _bad_ids(self, words: abc.Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of each word as it stands at the beginning of a text, and as it stands after a space where that differs.

        vLLM's rule: a word in the middle of another is left alone.
        """
        found = []
        for word in words:
            bare, spaced = (self._ids_of_word(prefix + word.lstrip()) for prefix in ("", " "))
            found.append(bare)
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                found.append(spaced)
        return found

    def _ids_of_word(self, word: str) -> tuple[int, ...]:
        tokenizer = self.need_tokenizer("bad_words", field="bad_words")
        try:
            ids = tuple(tokenizer.encode(word, add_special_tokens=False))
        except ValueError as error:
            raise FieldError(f"bad_words cannot be read: {error}", field="bad_words") from error
        if not ids:
            raise FieldError(f"bad_words holds {word!r}, for which there is no token; remove it", field="bad_words")
        return ids

    def close(self) -> None:
        """Let go of the draft model."""
        self._new_speculation = None

    def _check_state(self, state: SequenceState | None) -> None:
        if state is None:
            return
        if not isinstance(state, SequenceState):
            raise TypeError(f"state must be a SequenceState or None; got {type(state).__name__}")
        self.identity.require(state.model, "state")


def _params_for_each(
    params: SamplingParams | abc.Sequence[SamplingParams] | None, count: int
) -> abc.Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, str) or not isinstance(params, abc.Sequence):
        raise TypeError(f"params must be SamplingParams or a list of them, got {type(params).__name__}")
    if len(params) != count:
        raise ValueError(f"{len(params)} SamplingParams for {count} prompts; give one for all, or one a prompt")
    return params
