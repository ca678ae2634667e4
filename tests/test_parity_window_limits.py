"""B30: a windowed decoder equals eager at every length through the window's boundary and up to its context."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from parity import TOLERANCES
from tiny_graphs import change_attention, make_block, make_config, make_model

from graphport.export import export
from graphport.model_def.config import TransformerConfig
from graphport.model_def.transformer import Transformer
from graphport.runtime import LanguageModel, SamplingParams, load

WINDOW, CONTEXT = 15, 32
LIMIT = TOLERANCES["compiled", "float32"]
IDS = [int(i) for i in np.random.default_rng(0).integers(60, size=CONTEXT)]

_LOCAL = make_block({"window": WINDOW})


def _config() -> TransformerConfig:
    return make_config(_LOCAL, _LOCAL, max_positions=CONTEXT)


def _eager(model: Transformer, ids: Sequence[int]) -> NDArray[np.float32]:
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([list(ids)]))[0].numpy()
    return logits


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model(_config())


@pytest.fixture(scope="module")
def lm(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder: Path = tmp_path_factory.mktemp("window") / "bundle"
    export(model, folder, precision="fp32", verify=False)
    return load(folder, device="cpu")


def test_b30_prompts_of_every_length_around_the_window_and_up_to_the_context_equal_eager(
    lm: LanguageModel, model: Transformer
) -> None:
    wrong = {}
    for length in range(WINDOW - 2, CONTEXT + 1):
        difference = float(np.abs(lm.logits([IDS[:length]])[0] - _eager(model, IDS[:length])).max())
        if difference > LIMIT:
            wrong[length] = difference
    assert not wrong


@pytest.mark.parametrize("length", [WINDOW - 2, WINDOW, WINDOW + 1, CONTEXT - 1])
def test_b30_decoding_to_the_context_equals_eager_at_every_step(
    length: int, lm: LanguageModel, model: Transformer
) -> None:
    greedy = SamplingParams(max_new_tokens=CONTEXT, temperature=0.0, ignore_eos=True)
    (output,) = lm.generate([IDS[:length]], greedy)
    text = [*IDS[:length], *output.token_ids]
    assert (len(text), output.finish_reason) == (CONTEXT, "length")
    assert _eager(model, text)[length - 1 : -1].argmax(-1).tolist() == list(output.token_ids)


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1, None])
def test_b30_another_window_is_told_apart_from_the_first_length_that_shows_it(
    window: int | None, lm: LanguageModel, model: Transformer
) -> None:
    other = Transformer(change_attention(_config(), window=window)).eval()
    other.load_state_dict(model.state_dict())
    shown = min(WINDOW, window or WINDOW) + 1
    apart = [float(np.abs(lm.logits([IDS[:n]])[0] - _eager(other, IDS[:n])).max()) for n in (shown - 1, shown)]
    assert apart[0] <= LIMIT < apart[1]
