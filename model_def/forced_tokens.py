"""What an encoder-decoder says and never says whatever its logits are: one frozen record in the manifest.

In: ids from a checkpoint's generation config. Out: `ForcedTokens`, checked. It chooses no ids (see
`runtime/forced_ids.py`) and reads no file (see `huggingface_forced_tokens.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphport.model_def.speech_tokens import SpeechTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedTokens:
    """How the decoder's text begins and ends, and what may not come.

    `start`: ids of every text before the first that is chosen. `first` is then the first id, `last` the one at which
    a text that reaches its limit ends; None forces none. `never`: ids that are not generated; `never_first`: not as the
    first after `start` and `first`. `bad`: sequences of ids whose last one may not complete them. `languages`: ids by
    their codes; a text's own replaces that of the tokenizer in the source, and `start`'s last id or `first`
    (`names_target`). `needs_language`: there is no start without one. `speech`: of a model that hears, whose texts
    begin with `start`'s one id and what `SpeechTokens` says.
    """

    start: tuple[int, ...]
    first: int | None = None
    last: int | None = None
    never: tuple[int, ...] = ()
    never_first: tuple[int, ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()
    languages: Mapping[str, int] = field(default_factory=dict)
    names_target: str | None = None
    needs_language: bool = False
    speech: SpeechTokens | None = None

    def __post_init__(self) -> None:
        if not self.start:
            raise ValueError("a decoder's text needs an id to start with (decoder_start_token_id)")
        if self.names_target not in (None, "start", "first"):
            raise ValueError(f"names_target must be start, first or null, got {self.names_target!r}")
        singles = [*self.start, *self.never, *self.never_first, *(i for ids in self.bad for i in ids)]
        singles += [*self.languages.values(), *(i for i in (self.first, self.last) if i is not None)]
        for id_ in singles:
            if isinstance(id_, bool) or not isinstance(id_, int) or id_ < 0:
                raise ValueError(f"token ids must be whole numbers from 0, got {id_!r}")

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "ForcedTokens":
        """The inverse of `dataclasses.asdict` through JSON; raises ValueError and TypeError."""
        lists = {name: tuple(data[name]) for name in ("start", "never", "never_first")}
        speech = None if data.get("speech") is None else SpeechTokens.from_dict(data["speech"])
        bad = tuple(tuple(ids) for ids in data["bad"])
        return ForcedTokens(**{**data, **lists, "bad": bad, "speech": speech})
