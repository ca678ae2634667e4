"""How large activations become on a text: what smoothing divides by, and whether float16 can hold them.

In: a module and token ids or images. Out: largest magnitudes by name. Changes nothing.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from graphport.model_def.modulation import seeded_conditioning
from graphport.model_def.norms import Norm
from graphport.model_def.transformer import Transformer

Ranges = dict[str, NDArray[np.float32]]


def activation_ranges(model: Transformer, windows: Sequence[Sequence[int]]) -> Ranges:
    """Largest magnitude of each input channel [K] of every linear layer over `windows` of ids, by weight name.

    The first token counts: decoders park their largest activations there.
    """
    ranges: Ranges = {}
    for ids in windows:
        _watch(model, torch.tensor([list(ids)]), functools.partial(_keep_ranges, ranges))
    return ranges


def image_ranges(model: Transformer, batches: Sequence[NDArray[np.float32]]) -> Ranges:
    """`activation_ranges` over batches of pixels [B, C, h, w]."""
    ranges: Ranges = {}
    for pixels in batches:
        _watch(model, torch.from_numpy(pixels), functools.partial(_keep_ranges, ranges))
    return ranges


def image_peaks(model: Transformer, batches: Sequence[NDArray[np.float32]]) -> dict[str, float]:
    """`activation_peaks` over batches of pixels [B, C, h, w]."""
    peaks: dict[str, float] = {}
    for pixels in batches:
        _watch(model, torch.from_numpy(pixels), functools.partial(_keep_peaks, peaks))
    return peaks


def activation_peaks(model: Transformer, ids: Sequence[int], *, source: Tensor | None = None) -> dict[str, float]:
    """Largest magnitude that each linear layer and norm reads or makes over the text `ids`, by name, as they run.

    `source`: what a decoder that reads one reads beside them, as `encode` takes it.
    """
    peaks: dict[str, float] = {}
    _watch(model, torch.tensor([list(ids)]), functools.partial(_keep_peaks, peaks), source=source)
    return peaks


def _keep_ranges(ranges: Ranges, name: str, module: nn.Module, x: Tensor, _: Tensor) -> None:
    if isinstance(module, nn.Linear):
        peaks = x.abs().reshape(-1, x.shape[-1]).amax(dim=0).float().numpy()
        ranges[f"{name}.weight"] = np.maximum(ranges.get(f"{name}.weight", peaks), peaks)


def _keep_peaks(peaks: dict[str, float], name: str, _: nn.Module, x: Tensor, y: Tensor) -> None:
    peaks[name] = max(peaks.get(name, 0.0), float(x.abs().max()), float(y.abs().max()))


def _watch(
    model: Transformer,
    x: Tensor,
    keep: Callable[[str, nn.Module, Tensor, Tensor], None],
    *,
    source: Tensor | None = None,
) -> None:
    """Run `model` on ids or pixels, handing name, module, input and output of each linear layer and norm to `keep`."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, inputs, output: keep(name, module, inputs[0], output)

    watched = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Norm)]
    handles = [module.register_forward_hook(hook(name)) for name, module in watched]
    try:
        with torch.inference_mode():
            conditioning = seeded_conditioning(model.config, x)
            states = model(x, source=None if source is None else model.encode(source), conditioning=conditioning)
            if model.image_readout is not None:
                model.image_readout(states)
    finally:
        for handle in handles:
            handle.remove()
