"""The texts that an encoder is compared on, and how the eager module and graphs are run on them.

In: a configuration, a tokenizer. Out: `TextFeed`, a `Feed` of `encoder_evidence.py`. It compares nothing.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from graphport.export.certify import text_ids, text_origin
from graphport.export.encoder_runner import EncoderRunner, States
from graphport.model_def.certified_inputs import Inputs, Row, RowInputs
from graphport.model_def.config import TransformerConfig
from graphport.model_def.encoder_runs import text_runs
from graphport.model_def.modulation import seeded_conditioning
from graphport.model_def.parity_text import PARITY_TEXT
from graphport.model_def.played_runs import Evidence, References, play_runs
from graphport.model_def.transformer import Transformer

# Tokens of each text; those beyond the limit are cut to it.
LENGTHS = (96, 1, 31, 7, 128, 2, 64, 16)


class TextFeed:
    """Texts of different lengths, by default those that ship; see `Feed`."""

    alone = "each text alone"

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer_json: str | None,
        *,
        max_length: int,
        seed: int,
        inputs: Inputs | None = None,
    ) -> None:
        self.inputs = inputs or _inputs(config, tokenizer_json, max_length=max_length, seed=seed)
        assert isinstance(self.inputs, RowInputs)
        self._config = config
        self._rows = self.inputs.rows
        self.words = f"{len(self._rows)} texts in one padded batch"
        longest = max(len(row.ids) for row in self._rows)
        beyond = (f"texts of {longest + 1} to {max_length} tokens",) if longest < max_length else ()
        self.uncovered: tuple[str, ...] = beyond

    def eager(self, model: Transformer) -> States:
        """See Feed; nothing is padded."""
        return eager_states(model, self._rows)

    def batches(self, graph: Path, *, optimize: bool, pad_id: int = 0) -> States:
        """See Feed: one padded batch."""
        return EncoderRunner(graph, optimize=optimize).states(self._rows, pad_id=pad_id)

    def each_alone(self, graph: Path, *, optimize: bool) -> States:
        """See Feed."""
        runner = EncoderRunner(graph, optimize=optimize)
        return _joined([runner.states([row]) for row in self._rows])

    def play(self, graph: Path, references: References, *, observe: Callable[[str], None]) -> Evidence:
        """See Feed."""
        return play_runs(
            EncoderRunner(graph, optimize=True),
            text_runs(self._config, self._rows),
            references,
            observe=observe,
        )


def _inputs(config: TransformerConfig, tokenizer_json: str | None, *, max_length: int, seed: int) -> RowInputs:
    rows = parity_rows(config, tokenizer_json, max_length=max_length, seed=seed)
    ids = [token for row in rows for token in row.ids]
    return RowInputs(origin=text_origin(ids, config, tokenizer_json, seed=seed), rows=tuple(rows))


def parity_rows(config: TransformerConfig, tokenizer_json: str | None, *, max_length: int, seed: int) -> list[Row]:
    """Texts of different lengths, English where there is a tokenizer; the second half of each is of another type."""
    lengths = [min(length, max_length) for length in LENGTHS]
    ids = text_ids(PARITY_TEXT, config, tokenizer_json, length=sum(lengths), seed=seed)
    starts = list(itertools.accumulate(lengths, initial=0))
    end = None if config.pooling is None else config.pooling.ends_at
    if end is not None:  # each text ends as the model's own do, and the first again further on
        end = config.vocab_size - 1 if end < 0 else end
        for place in (lengths[0] // 2, *(start + length - 1 for start, length in zip(starts, lengths, strict=False))):
            ids[place] = end
    other = max(config.token_types - 1, 0)
    return [
        Row(tuple(ids[start : start + length]), tuple([0] * (length // 2) + [other] * (length - length // 2)))
        for start, length in zip(starts, lengths, strict=False)
    ]


def eager_states(model: Transformer, rows: Sequence[Row]) -> States:
    """States of the eager module, one text at a time: nothing is padded."""
    hidden, read_out = [], []
    with torch.inference_mode():
        for row in rows:
            types = torch.tensor([list(row.types)]) if model.config.token_types > 1 else None
            ids = torch.tensor([list(row.ids)])
            states = model(ids, token_types=types, conditioning=seeded_conditioning(model.config, ids))
            hidden.append(states[0].numpy())
            if model.pooling is not None:
                read_out.append(model.pooling(states, ids, torch.tensor([len(row.ids)], dtype=torch.int32))[0].numpy())
            if model.classifier is not None:
                lengths = torch.tensor([len(row.ids)], dtype=torch.int32)
                read_out.append(model.classifier(states, lengths)[0].numpy())
            if model.masked_head is not None:
                read_out.append(model.masked_head(states[0], model.embedding.weight).numpy())
    return States(hidden, read_out or None)


def _joined(parts: list[States]) -> States:
    """One `States` of several texts' own."""
    read_out = [vector for part in parts for vector in part.read_out or ()]
    return States([states for part in parts for states in part.hidden], read_out or None)
