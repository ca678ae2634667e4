"""What stands between the start of a text and its words where a model hears: language, task, whether times are marked.

In: ids from a checkpoint's generation config. Out: `SpeechTokens`, checked, and the ids that a request's text begins
with, as `generate` of transformers puts them. It chooses no ids (see `runtime/timestamps.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechTokens:
    """The ids of a model of recordings.

    `tasks`: ids by name. `language` and `task` are what the checkpoint asks for where a request says nothing; `forced`:
    ids after the start where neither is said, as old checkpoints have them, None for a language that is detected.
    `no_timestamps`: the id that says that times are not marked; the ids after it are the marks, every 0.02 s.
    `timestamps`: whether times are marked where a request says nothing. `latest_first`: how many marks after the first
    one a text may begin with.
    """

    tasks: Mapping[str, int] = field(default_factory=dict)
    language: str | None = None
    task: str | None = None
    forced: tuple[int | None, ...] = ()
    no_timestamps: int | None = None
    timestamps: bool = False
    latest_first: int | None = None

    def __post_init__(self) -> None:
        ids = [*self.tasks.values(), *self.forced, self.no_timestamps]
        for id_ in [*(id_ for id_ in ids if id_ is not None), 0 if self.latest_first is None else self.latest_first]:
            if isinstance(id_, bool) or not isinstance(id_, int) or id_ < 0:
                raise ValueError(f"token ids and limits must be whole numbers from 0, got {id_!r}")
        if self.task is not None and self.task not in self.tasks:
            raise ValueError(f"task {self.task!r} has no id; known are {', '.join(self.tasks) or 'none'}")
        if self.timestamps and self.no_timestamps is None:
            raise ValueError("timestamps need no_timestamps, the id before the first mark")
        if any(id_ is None for id_ in self.forced[1:]):
            raise ValueError(f"only the first of the forced ids may be left open, got {list(self.forced)}")

    def beginning(
        self, start: int, languages: Mapping[str, int], *, language: str | None, task: str | None, timestamps: bool
    ) -> tuple[int | None, ...]:
        """`start` and what follows it; None stands for a language that is to be detected.

        (`_retrieve_init_tokens` of transformers.)
        """
        language = self.language if language is None else language
        task = self.task if task is None else task
        ids: list[int | None] = [start]
        if language is None and task is None:
            ids += self.forced
        if language is not None:
            ids[1:2] = [languages[language]]
        elif languages and (len(ids) == 1 or ids[1] is None):
            ids[1:2] = [None]
        if task is None and language is not None and self.tasks:
            task = "transcribe"
        if task is not None:
            ids.append(self.tasks[task])
        if self.no_timestamps is not None and ids[-1] == self.no_timestamps:
            ids.pop()
        if self.no_timestamps is not None and not timestamps:
            ids.append(self.no_timestamps)
        if not languages:
            ids = [id_ for id_ in ids if id_ is not None]
        return tuple(ids)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "SpeechTokens":
        """The inverse of `dataclasses.asdict` through JSON; raises ValueError and TypeError."""
        return SpeechTokens(**{**data, "forced": tuple(data["forced"])})
