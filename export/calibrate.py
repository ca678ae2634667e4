"""How large activations become on a text: what smoothing divides by, and whether float16 can hold them.

In: a module and token ids. Out: largest magnitudes by name. Changes nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from graphport.model_def.norms import Norm
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

    def keep(name: str, module: nn.Module, x: Tensor, _: Tensor) -> None:
        if isinstance(module, nn.Linear):
            ranges[f"{name}.weight"] = x.abs().reshape(-1, x.shape[-1]).amax(dim=0).float().numpy()

    _watch(model, ids, keep)
    return ranges


def activation_peaks(model: Transformer, ids: Sequence[int]) -> dict[str, float]:
    """Largest magnitude that each linear layer and norm reads or makes over the text `ids`, by name, as they run."""
    peaks: dict[str, float] = {}

    def keep(name: str, _: nn.Module, x: Tensor, y: Tensor) -> None:
        peaks[name] = max(float(x.abs().max()), float(y.abs().max()))

    _watch(model, ids, keep)
    return peaks


def _watch(model: Transformer, ids: Sequence[int], keep: Callable[[str, nn.Module, Tensor, Tensor], None]) -> None:
    """Run `model` on `ids`, handing name, module, input and output of every linear layer and norm to `keep`."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, inputs, output: keep(name, module, inputs[0], output)

    watched = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Norm)]
    handles = [module.register_forward_hook(hook(name)) for name, module in watched]
    try:
        with torch.inference_mode():
            model(torch.tensor([list(ids)]))
    finally:
        for handle in handles:
            handle.remove()
