"""Passes that are switched off by name, and the account of what each place of a model became and why."""

import json
from pathlib import Path

import numpy as np
import pytest
from parity import TOLERANCES
from tiny_graphs import (
    CONFIGS,
    compiled,
    count_ops,
    decoder_feed,
    eager_step,
    exported,
    make_plan,
    run_graph,
    tiny_model,
)
from tiny_graphs import largest_difference as gap

from graphport.export import export
from graphport.export.pipeline import OPTIONAL_RULES, RULES, FusionError, compile_graph
from graphport.export.site_account import place_of, site_account
from graphport.runtime import load

LIMIT = TOLERANCES["compiled", "float32"]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("rule", OPTIONAL_RULES)
def test_b66_every_pass_alone_can_be_switched_off_and_the_model_stays_the_same(rule: str, kind: str) -> None:
    model = exported(kind)
    reports = compile_graph(model, make_plan(CONFIGS[kind], disabled=(rule,)))
    assert not any(report.fused for report in reports if report.rule == rule)
    feed = decoder_feed(CONFIGS[kind], (0,), 7)
    assert gap(run_graph(model, feed), eager_step(tiny_model(kind), feed), feed) <= LIMIT


def test_b66_the_pass_to_blame_is_the_one_without_which_the_error_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that is off by its epsilon is named by switching off one at a time."""
    from graphport.export import pipeline

    def broken(model: object, plan: object) -> object:
        report = pipeline.fuse_residual_norm(model, plan)  # type: ignore[arg-type]
        for node in model.graph:  # type: ignore[attr-defined]
            if node.op_type.startswith("Skip"):
                node.attributes["epsilon"] = type(node.attributes["epsilon"])(
                    "epsilon", node.attributes["epsilon"].type, 0.1
                )
        return report

    passes = tuple(broken if one is pipeline.fuse_residual_norm else one for one in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    monkeypatch.setitem(pipeline.OPTIONAL_PASSES, broken, "residual_norm")  # type: ignore[misc]
    feed = decoder_feed(CONFIGS["llama"], (0,), 7)
    wanted = eager_step(tiny_model("llama"), feed)
    errors = {}
    for rule in ("residual_norm", "packed_qkv", "packed_gate_up", "silu", "norm"):
        model = exported("llama")
        compile_graph(model, make_plan(CONFIGS["llama"], disabled=(rule,)))
        errors[rule] = gap(run_graph(model, feed), wanted, feed)
    assert min(errors, key=lambda rule: errors[rule]) == "residual_norm"
    assert errors.pop("residual_norm") <= LIMIT < min(errors.values())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("fusion", "no rule is called 'fusion'; the rules are smoothed"),
        ("linear", "rule linear makes what was asked for"),
    ],
)
def test_what_cannot_be_switched_off_is_refused_before_any_work(rule: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FusionError, match=message):
        export("nowhere", tmp_path / "out", disable_passes=[rule])
    assert set(OPTIONAL_RULES) < set(RULES)


def test_b66_a_bundle_without_fusions_is_certified_and_says_so(tmp_path: Path) -> None:
    off = ("residual_norm", "silu", "packed_qkv")
    bundle = export(tiny_model("llama"), tmp_path / "b", precision="int8", disable_passes=off)
    account = json.loads((bundle.path / "fusions.json").read_text(encoding="utf-8"))
    assert account["disabled"] == list(off)
    assert all(account["counts"][rule] == 0 for rule in off)
    with load(bundle.path, threads=1) as lm:
        assert np.isfinite(lm.logits([[1, 2, 3]])[0]).all()


def test_every_place_says_what_it_was_what_it_became_and_by_which_rules() -> None:
    model, reports = compiled("llama", "int8")
    places = {record["place"]: record for record in site_account(exported("llama"), model, reports)}
    layers = [f"layer {layer} {part}" for layer in (0, 1) for part in ("norms", "attention", "feed_forward")]
    assert places.keys() == {"embedding", *layers, "final_norm", "head"}
    attention = places["layer 0 attention"]
    assert attention["before"][:4] == ["Linear", "Linear", "Linear", "RotaryCachedAttention"]
    assert attention["after"] == ["MatMulNBits", "GroupQueryAttention", "MatMulNBits"]
    assert {"packed_qkv", "attention", "linear"} <= set(attention["rules"])
    assert attention["flops"] == 2 * 48 * (128 + 64)
    assert places["layer 1 feed_forward"]["after"] == ["MatMulNBits", "Split", "QuickGelu", "Mul", "MatMulNBits"]
    assert places["head"]["flops"] == 2 * 48 * 61
    assert places["head"]["bytes"] == 61 * 64 + 61 * 2 * 4
    nodes = [name for record in places.values() for name in record["nodes"]]
    assert len(nodes) == len(set(nodes)) == sum(count_ops(model).values())


def test_a_candidate_that_was_left_has_the_check_that_failed_and_the_value() -> None:
    model, reports = compiled("mixed")
    places = {record["place"]: record for record in site_account(exported("mixed"), model, reports)}
    misses = [miss for record in places.values() for miss in record["missed"]]
    assert misses
    assert all(miss["check"] and miss["found"] and miss["rule"] in RULES for miss in misses)
    assert any(miss["rule"] == "attention" and "12" in miss["found"] for miss in places["layer 2 attention"]["missed"])


def test_places_of_sites() -> None:
    assert place_of("layer 3 attention.query") == place_of("layer 3 attention") == "layer 3 attention"
    assert place_of("layer 3 attention_norm") == place_of("layer 3 feed_forward_output_norm") == "layer 3 norms"
    assert place_of("layer 3 attention.query_norm") == "layer 3 attention"
    assert place_of("layer 11 feed_forward.gate") == "layer 11 feed_forward"
    assert (place_of("embedding lookup"), place_of("final_norm")) == ("embedding", "final_norm")
