"""How much a model's predictions change when one group of its matrices is rounded.

In: a module, rounded groups, ids. Out: a KL divergence a group, measured by running the module. It chooses nothing and
leaves the module as it was.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from graphport.export.round_matrices import RoundedGroup
from graphport.model_def.transformer import Transformer


def sensitivities(model: Transformer, groups: Sequence[RoundedGroup], ids: Sequence[int]) -> Iterator[float]:
    """The mean over `ids` of KL(model || model with the group rounded) in nats, group after group.

    What comes before a group's block is computed once.
    """
    with torch.no_grad():
        text = torch.tensor([list(ids)])
        tables = model.rotary_tables(len(ids), len(ids))
        states = [model.embed(text, torch.arange(len(ids)))]
        for block, pair in zip(model.layers, tables, strict=True):
            states.append(block(states[-1], tables=pair))
        reference = _log_probabilities(model, states[-1])
        for group in groups:
            layer = group.layer
            with _replaced(model, group.weights()):
                x = states[layer]
                for block, pair in zip(model.layers[layer:], tables[layer:], strict=True):
                    x = block(x, tables=pair)
            divergence = kl_div(_log_probabilities(model, x), reference, log_target=True, reduction="sum")
            yield max(float(divergence) / len(ids), 0.0)


def _log_probabilities(model: Transformer, x: Tensor) -> Tensor:
    return log_softmax(model.read_out(x)[0], dim=-1)


@contextlib.contextmanager
def _replaced(model: Transformer, weights: Mapping[str, NDArray[np.float32]]) -> Iterator[None]:
    """Let the module compute with other matrices for as long as the block runs."""
    parameters = {name: model.get_parameter(name) for name in weights}
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = torch.from_numpy(weights[name]).to(parameter.dtype)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]
