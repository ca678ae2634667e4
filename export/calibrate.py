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

Ranges = dict[str, NDArray[np.float32]]


def activation_ranges(model: Transformer, windows: Sequence[Sequence[int]]) -> Ranges:
    """Largest magnitude of each input channel [K] of every linear layer over `windows` of ids, by weight name.

    The first token counts: decoders park their largest activations there.
    """
    ranges: Ranges = {}

    def keep(name: str, module: nn.Module, x: Tensor, _: Tensor) -> None:
        if isinstance(module, nn.Linear):
            peaks = x.abs().reshape(-1, x.shape[-1]).amax(dim=0).float().numpy()
            ranges[f"{name}.weight"] = np.maximum(ranges.get(f"{name}.weight", peaks), peaks)

    for ids in windows:
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
