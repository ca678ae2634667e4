"""Sensitivities of groups of matrices: what a loss of bits costs, measured on the module, which is left as it was."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from tiny_graphs import (
    CONFIGS,
    decoder_feed,
    eager_step,
    export_decoder,
    exported,
    make_config,
    make_model,
    make_plan,
    run_graph,
    tiny_model,
)

from graphport.export.calibrate import activation_ranges
from graphport.export.certify import eager_logits
from graphport.export.parity import compare
from graphport.export.pipeline import compile_graph
from graphport.export.round_matrices import RoundedGroup, round_groups
from graphport.export.sensitivity import sensitivities
from graphport.export.targets import CPU, CUDA, Target

IDS = [int(i) for i in np.random.default_rng(7).integers(61, size=60)]
KINDS = ("llama", "gemma", "mixed")


@functools.cache
def groups_of(name: str, *, target: Target = CPU) -> list[RoundedGroup]:
    model = tiny_model(name)
    ranges = activation_ranges(model, [IDS])
    plan = dataclasses.replace(make_plan(CONFIGS[name], "int4", target=target), activation_ranges=ranges)
    return list(round_groups(exported(name), plan, model, [IDS]))


@pytest.mark.parametrize("name", KINDS)
def test_a_sensitivity_is_the_divergence_of_the_module_with_those_weights(name: str) -> None:
    model, groups = tiny_model(name), groups_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = list(sensitivities(model, groups, IDS))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    wanted = eager_logits(model, IDS)
    for group, cost in zip(groups, found, strict=True):
        changed = make_model(CONFIGS[name])
        changed.load_state_dict(before | {key: torch.from_numpy(w) for key, w in group.weights().items()})
        assert cost == pytest.approx(compare(wanted, eager_logits(changed, IDS)).kl, rel=1e-3, abs=1e-6)
        assert cost > 0


@pytest.mark.parametrize("name", KINDS)
def test_groups_hold_every_linear_layer_of_the_blocks_once_and_undo_the_smoothing(name: str) -> None:
    model, groups = tiny_model(name), groups_of(name)
    names = [key for group in groups for key in group.matrices]
    assert sorted(names) == sorted(f"{path}.weight" for path, part in model.named_modules() if _is_linear(part))
    for group in groups:
        for key, rounded in group.weights().items():
            own = model.get_parameter(key).detach().numpy()
            assert np.allclose(group.smoothed[key].undo(group.smoothed[key].weight()), own, rtol=1e-4, atol=1e-6)
            assert 0 < np.abs(rounded - own).mean() < 0.5 * np.abs(own).mean()


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear)


def test_a_matrix_that_two_layers_share_is_left_to_the_lowering() -> None:
    model = make_model(make_config())
    model.blocks[1].get_submodule("attention.output").weight = model.get_parameter("blocks.0.attention.output.weight")
    graph = export_decoder(model)
    groups = list(round_groups(graph, make_plan(model.config, "int4"), model, [IDS]))
    names = {key for group in groups for key in group.matrices}
    assert len(names) == 2 * 7 - 1
    plan = make_plan(model.config, "int4", matrices={k: m for group in groups for k, m in group.matrices.items()})
    compile_graph(graph, plan)
    feed = decoder_feed(model.config, (0,), 9)
    wanted = eager_step(model, feed)["logits"]
    assert compare(wanted, run_graph(graph, feed)["logits"]).kl < compare(wanted, np.zeros_like(wanted)).kl / 4


def test_zero_points_are_for_targets_whose_kernels_take_them() -> None:
    for target, has_zero_points in ((CPU, True), (CUDA, False)):
        blocks = [matrix.blocks for group in groups_of("llama", target=target) for matrix in group.matrices.values()]
        assert {b is not None and b.zero_points is not None for b in blocks} == {has_zero_points}


def test_the_module_is_restored_when_it_fails() -> None:
    model, groups = tiny_model("llama"), groups_of("llama")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    bad = [dataclasses.replace(groups[0], matrices={**groups[0].matrices, **groups[3].matrices})]
    with pytest.raises(KeyError):
        next(sensitivities(model, bad, IDS))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
