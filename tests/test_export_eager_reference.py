"""Eager PyTorch as a reference: the logits of the whole module, in pieces; what cannot be one is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from parity import assert_parity
from tiny_models import VOCAB, tiny_configs, tiny_encoder_configs, tiny_model, token_ids

import graphport.export.eager_reference as module
from graphport.export.eager_reference import EagerReference, open_reference
from graphport.export.source import open_source
from graphport.export.targets import TargetError
from graphport.model_def.transformer import Transformer

CONFIGS = tiny_configs()
ROWS = 7


def _reference(model: Transformer) -> EagerReference:
    return EagerReference(open_source(model, seed=0))


@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("first_row", [0, 11])
def test_pieces_are_the_rows_of_the_module(kind: str, first_row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", ROWS * 4 * VOCAB)
    model, ids = tiny_model(CONFIGS[kind]), token_ids(30)
    with torch.no_grad():
        expected = model(ids[None])[0, first_row:].numpy()
    pieces = list(_reference(model).stream_logits(ids.tolist(), first_row=first_row))
    assert max(len(piece) for piece in pieces) == ROWS
    assert_parity(np.concatenate(pieces), expected, "equal models")


def test_a_reference_says_what_it_can_be_compared_with() -> None:
    reference = _reference(tiny_model(CONFIGS["grouped_query"]))
    assert (reference.vocab_size, reference.max_length) == (VOCAB, CONFIGS["grouped_query"].max_positions)
    assert (reference.tokenizer_json, reference.notes) == (None, ())


def test_logits_that_are_not_finite_are_refused() -> None:
    model = tiny_model(CONFIGS["grouped_query"])
    with torch.no_grad():
        model.embedding.weight[7] = torch.inf
    with pytest.raises(ValueError, match="logits of the source are not finite: it cannot serve as a reference"):
        list(_reference(model).stream_logits([1, 7, 2]))


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    name = sorted(tiny_encoder_configs())[0]
    (tmp_path / "own.py").write_text(
        f"from tiny_models import tiny_encoder_configs\ndef make():\n    return tiny_encoder_configs()[{name!r}]\n"
    )
    with pytest.raises(TargetError, match=r"own.py:make is an encoder: it predicts no next token"):
        open_reference(f"{tmp_path / 'own.py'}:make")
