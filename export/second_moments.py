"""How the inputs of linear layers vary on a text: their second moments, one block of the model at a time.

In: a module and windows of token ids. Out: X^T X / T of every linear layer's input. It changes nothing and rounds
nothing; no more than one block's moments are held at once.

Shapes: `T` tokens of all windows, `K` channels of an input.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from graphport.model_def.block import Block
from graphport.model_def.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class InputMoments:
    """The mean of x x^T, float32 [K, K], over the inputs of the linear layers whose weights are called `names`."""

    names: tuple[str, ...]
    matrix: NDArray[np.float32]


def second_moments(model: Transformer, windows: Sequence[Sequence[int]]) -> Iterator[InputMoments]:
    """Moments over `windows` of ids, which are read apart, in the order of the blocks; the vocabulary head has none."""
    with torch.inference_mode():
        texts = [torch.tensor([list(window)]) for window in windows]
        states = [model.embed(ids, torch.arange(ids.shape[1])) for ids in texts]
        lengths = {ids.shape[1] for ids in texts}
        tables = {length: model.rotary_tables(length, length) for length in lengths}
        biases = {length: model.text_bias(length) for length in lengths}
        for layer, block in enumerate(model.layers):
            watch = _Watch(block, prefix=f"blocks.{layer}.")
            try:
                states = [block(x, tables=tables[x.shape[1]][layer], bias=biases[x.shape[1]]) for x in states]
            finally:
                watch.end()
            yield from watch.moments()


class _Watch:
    """Sums x^T x of the inputs of a block's linear layers; layers that read one tensor share a sum."""

    def __init__(self, block: Block, *, prefix: str) -> None:
        self._sums: dict[str, Tensor] = {}
        self._readers: dict[str, list[str]] = {}  # the first of the layers that read one tensor: all of them
        self._num_tokens: dict[str, int] = {}
        self._last: tuple[str, Tensor | None] = ("", None)
        linears = [(name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        self._handles = [module.register_forward_pre_hook(self._hook(prefix + name)) for name, module in linears]

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            first, read = self._last
            if read is not x:
                first = name
                self._last = (first, x)
                flat = x.reshape(-1, x.shape[-1]).float()
                self._num_tokens[first] = self._num_tokens.get(first, 0) + len(flat)
                total = self._sums.setdefault(first, torch.zeros(flat.shape[1], flat.shape[1]))
                total.addmm_(flat.T, flat)
            readers = self._readers.setdefault(first, [])
            if name not in readers:
                readers.append(name)

        return keep

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._last = ("", None)

    def moments(self) -> Iterator[InputMoments]:
        for first, total in self._sums.items():
            names = tuple(f"{name}.weight" for name in self._readers[first])
            yield InputMoments(names=names, matrix=(total / self._num_tokens[first]).numpy())
