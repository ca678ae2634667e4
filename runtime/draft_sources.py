"""Where drafts of the next tokens come from, as the caller of `load` chose.

In: the choice, and the session to draft for. Out: what makes a `Speculation` for each sequence, or None without drafts.
"""

import os
from collections.abc import Callable

from graphport.model_def.flags import require_flags
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.draft_model import DraftModel
from graphport.runtime.session import Session
from graphport.runtime.speculation import LONGEST_DRAFT, LONGEST_QUANTISED_DRAFT, PromptLookup, Speculation
from graphport.runtime.tokenizer import Tokenizer


def check_drafts(draft: str | os.PathLike[str] | None, *, prompt_lookup: bool) -> None:
    """Raise TypeError or ValueError for a choice that cannot be, before anything is opened."""
    require_flags(prompt_lookup=prompt_lookup)
    if prompt_lookup and draft is not None:
        raise ValueError("prompt_lookup=True and a draft bundle exclude each other: drafts come from one of them")


def speculation_source(
    session: Session,
    tokenizer: Tokenizer | None,
    *,
    draft: str | os.PathLike[str] | None,
    prompt_lookup: bool,
    max_length: int,
) -> Callable[[], Speculation] | None:
    """What makes the drafts of each sequence of `session`. Opens the draft bundle, on the same device."""
    longest = LONGEST_QUANTISED_DRAFT if session.has_quantised_cache else LONGEST_DRAFT
    if prompt_lookup:
        return lambda: Speculation(PromptLookup(), longest=longest)
    if draft is None:
        return None
    model = DraftModel(
        open_bundle(draft),
        vocab_size=session.vocab_size,
        tokenizer=tokenizer,
        max_length=max_length,
        device=session.device,
        device_id=session.device_id,
        threads=session.threads,
    )
    return lambda: Speculation(model.drafter(), longest=longest)
