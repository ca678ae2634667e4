"""The comparisons themselves: tiny models in which a fault shows, and a report that says where."""

import math
from typing import Any

import pytest
import torch
from parity import TOLERANCES, assert_parity, assert_same_choice, difference, top2_gap
from tiny_models import tiny_configs, tiny_encoder_configs, tiny_model, token_ids
from torch import Tensor

from graphport.model_def import attention as attention_module

CONFIGS = tiny_configs()
ENCODERS = tiny_encoder_configs()
LENGTH = 13


@pytest.mark.parametrize("name", CONFIGS | ENCODERS)
def test_tiny_models_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention far from uniform, a best token well ahead, nothing at its initial 0 or 1."""
    top_weights = []

    def watched(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
        one_hot = torch.eye(LENGTH).expand(*keys.shape[:2], -1, -1)
        weights = attend(queries, keys, one_hot, **options)
        top_weights.append(float(weights[:, :, -1].max(dim=-1).values.mean()))
        return attend(queries, keys, values, **options)

    attend = attention_module.attend
    monkeypatch.setattr(attention_module, "attend", watched)
    config = (CONFIGS | ENCODERS)[name]
    model = tiny_model(config).requires_grad_(requires_grad=False)
    logits = model(token_ids(3, LENGTH))
    assert min(top_weights) > 0.3, "the largest of 13 weights"
    if config.head != "none":
        assert top2_gap(logits).mean() > 0.5
    for key, parameter in model.named_parameters():
        assert float((parameter - parameter.mean()).abs().max()) > 0.1, f"{key} is nearly constant"
    assert len(config.blocks) >= 2


def test_tiny_models_are_the_same_for_the_same_seed() -> None:
    config = CONFIGS["everything"]
    for one, other in zip(tiny_model(config, 3).parameters(), tiny_model(config, 3).parameters(), strict=True):
        assert torch.equal(one, other)
    different = zip(tiny_model(config, 3).parameters(), tiny_model(config, 4).parameters(), strict=True)
    assert not any(torch.equal(one, other) for one, other in different)


def test_the_report_names_size_place_and_agreement() -> None:
    expected = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    actual = expected.clone()
    actual[1, 2] = 5.0
    report = (
        r"cached \(float32\) one: max difference 4 at \(1, 2\), mean 0.667, argmax agreement 50.00%; tolerance 0.0001"
    )
    with pytest.raises(AssertionError, match=report):
        assert_parity(actual, expected, "cached", what="one")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinitely_far(bad: float) -> None:
    expected = torch.zeros(2, 3)
    actual = expected.clone()
    actual[0, 1] = bad
    assert difference(actual, expected).max_abs == math.inf
    with pytest.raises(AssertionError, match=r"max difference inf at \(0, 1\)"):
        assert_parity(actual, expected, "cached")
    with pytest.raises(AssertionError, match="the expected values are not finite"):
        assert_parity(expected, actual, "cached")


def test_comparing_nothing_or_other_shapes_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"shapes differ: \(2, 1\) against \(2, 3\)"):
        difference(torch.zeros(2, 1), torch.zeros(2, 3))  # it would broadcast
    with pytest.raises(AssertionError, match="nothing to compare"):
        difference(torch.zeros(0, 3), torch.zeros(0, 3))


def test_the_choice_is_compared_only_where_the_best_token_is_clear() -> None:
    expected = torch.tensor([[0.0, 1.0], [1.0, 1.00001]])
    assert_same_choice(torch.tensor([[0.0, 1.0], [1.00001, 1.0]]), expected, "cached")
    with pytest.raises(AssertionError, match="best token differs in 1 rows"):
        assert_same_choice(torch.tensor([[1.0, 0.0], [1.0, 1.00001]]), expected, "cached")
    with pytest.raises(AssertionError, match="no row of cached has a clear best token"):
        assert_same_choice(expected[1:], expected[1:], "cached")


def test_the_tolerances_cannot_be_changed_by_a_test() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        TOLERANCES["cached", "float32"] = 1.0  # type: ignore[index]
