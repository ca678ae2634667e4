"""How far eager PyTorch in float32 is from eager PyTorch in float64: what no graph in float32 can be held below.

In: the eager module, its logits in float32. Out: `FloatLoss`, measured when a check first misses its absolute limit.
What is allowed for it stands in `model_def/conditioning.py`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from graphport.export.parity import TOLERANCES, row_figures
from graphport.model_def.conditioning import Conditioning, FloatLoss
from graphport.model_def.signature import LOGITS
from graphport.model_def.transformer import Transformer

Rows = NDArray[np.float32]
WideRows = NDArray[np.float64]


class MeasuredLoss:
    """Float32's loss on `reference`, rows [N, V]; `in_float64` gives the same rows of a model that is in float64.

    It takes twice as long as eager did, and 8 bytes a parameter, when it is first asked for.
    """

    def __init__(
        self,
        model: Transformer,
        reference: Callable[[], Rows],
        in_float64: Callable[[], Sequence[WideRows]],
    ) -> None:
        self._model = model
        self._reference = reference
        self._in_float64 = in_float64

    @functools.cached_property
    def _measured(self) -> FloatLoss:
        reference = self._reference()
        with float64_parameters(self._model), torch.inference_mode():
            wide = np.concatenate(self._in_float64())
        found = row_figures(reference, wide)
        largest = np.abs(reference).max(axis=1)
        return FloatLoss(
            max_abs=found.max_abs.astype(np.float32),
            rms=found.rms.astype(np.float32),
            kl=found.kl.astype(np.float32),
            largest=largest,
        )

    def __call__(self) -> FloatLoss:
        """The loss, measured now if it was not yet."""
        return self._measured

    def conditioning(self, *, measure: bool = False) -> Conditioning | None:
        """What a certificate says of it: nothing when no check asked for it, or with `measure` when it raises no limit.

        Limits are those of `TOLERANCES["compiled", ...]`.
        """
        is_needed = self().raises(TOLERANCES["compiled", "max_abs"]) if measure else "_measured" in vars(self)
        return Conditioning(losses={LOGITS: self._measured}) if is_needed else None


@contextlib.contextmanager
def float64_parameters(model: Transformer) -> Iterator[None]:
    """The parameters and buffers of `model` in float64; afterwards they are the very tensors that they were."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    held = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(torch.float64)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, held, strict=True):
            tensor.data = data
