"""A graph that fails its parity names what moved it: the pass, or the level of ONNX Runtime's optimiser."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
import torch
from tiny_graphs import CONFIGS, export_decoder, exported, make_block, make_config, make_model, make_plan, tiny_model

import graphport.export.decoder_evidence as evidence_module
import graphport.export.guilty_pass as guilty_module
import graphport.export.pipeline as pipeline_module
from graphport.export.bundle import write_graph
from graphport.export.certify import certify_stages, eager_logits
from graphport.export.fuse_residual_norm import fuse_residual_norm
from graphport.export.graph_pass import CompilePlan
from graphport.export.graph_runner import GraphRunner
from graphport.export.guilty_pass import NUM_IDS, optimiser_levels
from graphport.export.model_export import export
from graphport.export.parity import TOLERANCES, Difference, ParityError, compare, require_passed
from graphport.export.pipeline import OPTIONAL_RULES, compile_graph
from graphport.model_def.signature import GRAPH_FILE

NUM_LAYERS = 24
IDS = np.random.default_rng(3).integers(61, size=NUM_IDS).tolist()
LEVELS = ("off", "basic", "extended", "layout", "all")


class Deep(NamedTuple):
    """A deep decoder with outliers: its graph before the passes, and eager's logits of IDS."""

    exported: ir.Model
    eager: np.ndarray
    plan: CompilePlan


@pytest.fixture(scope="module")
def deep() -> Deep:
    config = make_config(*[make_block() for _ in range(NUM_LAYERS)])
    model = make_model(config)
    with torch.no_grad():
        model.embedding.weight[:, 5] *= 30.0  # one channel is far larger than the others in every layer
    return Deep(export_decoder(model), eager_logits(model, IDS), make_plan(config))


def written(deep: Deep, folder: Path, **changes: Any) -> CompilePlan:
    """The plan with these changes; the graph that it compiles is in `folder` afterwards."""
    plan, graph = dataclasses.replace(deep.plan, **changes), deep.exported.clone()
    compile_graph(graph, plan)
    write_graph(graph, folder)
    return plan


def test_b66_every_level_of_the_optimiser_holds_in_a_deep_model_with_outliers(deep: Deep, tmp_path: Path) -> None:
    plan = written(deep, tmp_path)
    found = optimiser_levels(tmp_path, plan, IDS, deep.eager)
    assert tuple(found) == LEVELS
    table = {level: difference.max_abs for level, difference in found.items()}
    assert max(table.values()) <= TOLERANCES["compiled", "max_abs"], table
    others = optimiser_levels(tmp_path, plan, IDS[::-1], deep.eager)
    assert min(difference.max_abs for difference in others.values()) > 1000 * TOLERANCES["compiled", "max_abs"]


@pytest.mark.parametrize("alone", OPTIONAL_RULES)
def test_b66_every_pass_alone_holds_in_a_deep_model_with_outliers(alone: str, deep: Deep, tmp_path: Path) -> None:
    plan = written(deep, tmp_path, disabled=tuple(rule for rule in OPTIONAL_RULES if rule != alone))
    found = GraphRunner(tmp_path / GRAPH_FILE, plan.config, portable=True).logits(IDS)
    difference = compare(deep.eager, found)
    assert difference.max_abs <= TOLERANCES["compiled", "max_abs"], difference


def test_b66_the_error_names_the_guilty_pass_and_how_to_do_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: ir.Model, plan: Any) -> Any:
        report = fuse_residual_norm(model, plan)
        for node in model.graph:
            if node.op_type == "SkipSimplifiedLayerNormalization":
                node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.01)
        return report

    wrong.__name__ = fuse_residual_norm.__name__
    passes = tuple(wrong if one is fuse_residual_norm else one for one in pipeline_module.PASSES)
    for module in (pipeline_module, guilty_module):
        monkeypatch.setattr(module, "PASSES", passes)
        monkeypatch.setattr(module, "OPTIONAL_PASSES", {**pipeline_module.OPTIONAL_PASSES, wrong: "residual_norm"})
    reference = eager_logits(tiny_model("llama"), IDS)
    checks = certify_stages(
        exported("llama"), make_plan(CONFIGS["llama"]), IDS, reference, folder=tmp_path / "out", observe=lambda _: None
    )
    assert checks[0].passed
    with pytest.raises(ParityError, match=r"after the pass fuse_residual_norm .*--disable-pass residual_norm"):
        require_passed(checks)
    assert not list(tmp_path.iterdir())


def test_b66_the_error_names_the_level_at_which_what_ships_parts_from_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = optimiser_levels

    def levels(*arguments: Any) -> dict[str, Difference]:
        found = real(*arguments)
        return {
            level: dataclasses.replace(one, max_abs=3.0) if level in LEVELS[2:] else one for level, one in found.items()
        }

    def failed(*arguments: Any, **options: Any) -> Any:
        return dataclasses.replace(evidence_module_check(*arguments, **options), measured=3.0)

    evidence_module_check = evidence_module.check_shipped
    monkeypatch.setattr(guilty_module, "optimiser_levels", levels)
    monkeypatch.setattr(evidence_module, "check_shipped", failed)
    with pytest.raises(ParityError, match="from its level extended on"):
        export(tiny_model("llama"), tmp_path / "bundle", precision="fp32")
    assert not list(tmp_path.iterdir())
