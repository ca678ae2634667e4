"""How large the inputs of every linear layer become on a text: what smoothing divides by.

In: a module and token ids. Out: one number a channel for each linear weight, by the weight's name. Changes nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from graphport.model_def.transformer import Transformer

NUM_CALIBRATION_IDS = 160  # the text has about 180 with a vocabulary of 49,152

Ranges = dict[str, NDArray[np.float32]]

# Prose, dialogue, code, numbers and another language; no sentence of the parity text, which judges the result.
CALIBRATION_TEXT = """\
The weather in spring is often mild, and the roads dry early. A small bakery opened on the corner in March, and \
by noon the line reached the square. "Where is the nearest station?" she asked. He said it was two streets away, \
past the bank, and that the trains were late.

def add(values):
    total = 0
    for value in values:
        total += value
    return total

In 1912 the ship left Southampton for New York. Water boils at 100 degrees Celsius at sea level. The theory of \
evolution explains the diversity of life; the theory of relativity explains gravity. La vie est belle. 12, 15, \
18, 21 and 24 are multiples of three. Please write a short letter to your landlord about the broken heater."""


def activation_ranges(model: Transformer, ids: Sequence[int]) -> Ranges:
    """Largest magnitude of each input channel [K] of every linear layer over the text `ids`, by weight name.

    The first token counts: decoders park their largest activations there.
    """
    ranges: Ranges = {}

    def watch(name: str) -> object:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0]
            ranges[f"{name}.weight"] = x.abs().reshape(-1, x.shape[-1]).amax(dim=0).float().numpy()

        return hook

    hooks = [
        module.register_forward_pre_hook(watch(name))  # type: ignore[arg-type]  # torch types hooks as object
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with torch.inference_mode():
            model(torch.tensor([list(ids)]))
    finally:
        for hook in hooks:
            hook.remove()
    return ranges
