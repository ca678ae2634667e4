"""Attentions with a window count the tokens of their own caches: where, where not, and with the same numbers."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from tiny_graphs import (
    CONFIGS,
    Feed,
    decoder_feed,
    exported,
    make_block,
    make_config,
    make_plan,
    open_graph,
    run_session,
    valid_part,
)

from graphport.export.pipeline import OPTIONAL_RULES, compile_graph, expected_fusions
from graphport.export.planned_source import planned_source
from graphport.export.targets import CPU, CUDA
from graphport.export.window_caches import RULE, window_caches, window_layers
from graphport.model_def.signature import (
    LOGITS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    WINDOW_SEQLENS_K,
    WINDOW_TOTAL_SEQUENCE_LENGTH,
    decoder_signature,
    past_key,
    past_value,
    present_key,
    present_value,
    unmoved_windows,
)

GEMMA = CONFIGS["gemma"]  # a window of 6 in layer 0
CONTEXT = 128  # so much longer than the window that its rows are dropped


def _plan(**changes: Any) -> Any:
    return dataclasses.replace(make_plan(GEMMA), **{"max_length": CONTEXT, **changes})


def test_the_inputs_are_added_where_the_signature_has_them() -> None:
    model = exported("gemma")
    (report,) = [each for each in compile_graph(model, _plan()) if each.rule == RULE]
    assert (report.fused, report.missed) == (("layer 0 attention",), ())
    signature = decoder_signature(GEMMA, window_layers=(0,))
    shapes = {value.name: [str(size) for size in value.shape or ()] for value in model.graph.inputs}
    assert list(shapes) == [spec.name for spec in signature.inputs]
    for spec in signature.inputs[4:]:
        assert shapes[spec.name] == [str(size) for size in spec.shape]
    kernels = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert [node.inputs[5].name for node in kernels if node.inputs[5] is not None] == [WINDOW_SEQLENS_K, SEQLENS_K]
    assert [len(node.inputs) > 9 for node in kernels] == [True, False]


@pytest.fixture(scope="module")
def sessions() -> tuple[ort.InferenceSession, ort.InferenceSession]:
    """Gemma's graph with whole caches, and with those of its window apart."""
    plain, apart = exported("gemma"), exported("gemma")
    compile_graph(plain, make_plan(GEMMA))
    compile_graph(apart, _plan())
    return open_graph(plain), open_graph(apart)


def _moved(feed: Feed, by: int) -> Feed:
    """The feed with the caches of layer 0 without their oldest `by` tokens."""
    moved = {
        **feed,
        **unmoved_windows({WINDOW_SEQLENS_K}, feed[SEQLENS_K] - by, np.array(feed[TOTAL_SEQUENCE_LENGTH] - by)),
    }
    for name in (past_key(0), past_value(0)):
        moved[name] = np.full_like(feed[name], np.nan)
        moved[name][:, :, : feed[name].shape[2] - by] = feed[name][:, :, by:]
    names = decoder_signature(GEMMA, window_layers=(0,)).inputs
    return {spec.name: moved[spec.name] for spec in names}


@pytest.mark.parametrize(("lengths", "num_new"), [([20], 1), ([20], 9), ([20, 33, 15], 1)])
@pytest.mark.parametrize("by", [0, 8])
def test_numbers_are_the_same_wherever_the_rows_lie(
    lengths: list[int], num_new: int, by: int, sessions: tuple[ort.InferenceSession, ort.InferenceSession]
) -> None:
    plain, apart = sessions
    feed = decoder_feed(GEMMA, lengths, num_new, capacity=48)
    wanted, found = run_session(plain, feed), run_session(apart, _moved(feed, by))
    assert np.abs(found[LOGITS] - wanted[LOGITS]).max() <= (0 if by == 0 else 1e-5)
    for name in (present_key(1), present_value(1)):
        assert valid_part(name, found[name], feed).shape == valid_part(name, wanted[name], feed).shape
    for row, length in enumerate(lengths):
        new = slice(length, length + num_new)
        old = slice(length - by, length - by + num_new)
        assert np.array_equal(found[present_key(0)][row, :, old], wanted[present_key(0)][row, :, new])
    other = _moved(feed, by)
    other[WINDOW_SEQLENS_K] = other[WINDOW_SEQLENS_K] - 1
    assert np.abs(run_session(apart, other)[LOGITS] - wanted[LOGITS]).max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0,)),
        ({"target": CUDA, "precision": CUDA.precision("fp16")}, ()),  # a captured step keeps its addresses
        ({"max_length": 101}, ()),
        ({"max_length": 102}, (0,)),
        ({"disabled": (RULE,)}, ()),
        ({"disabled": ("attention",)}, ()),
    ],
)
def test_only_targets_that_move_rows_and_windows_much_shorter_than_the_context_have_them(
    changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    plan = _plan(**changes)
    assert window_layers(plan) == layers
    assert expected_fusions(plan)[RULE] == len(layers)
    assert RULE in OPTIONAL_RULES


def test_a_head_size_that_the_kernel_does_not_take_keeps_whole_caches_and_the_report_says_why() -> None:
    config = make_config(make_block({"head_dim": 12, "window": 6}), make_block({"window": 6}), max_positions=CONTEXT)
    assert window_layers(make_plan(config)) == (1,)
    plan = make_plan(dataclasses.replace(config, blocks=(config.blocks[0], make_block())))
    model = exported("gemma")
    report = window_caches(model, plan)
    assert report.fused == ()
    missed = [(miss.site, miss.found) for miss in report.missed]
    assert missed == [("layer 0 attention", "head_dim 12 is no multiple of 8")]
    assert WINDOW_TOTAL_SEQUENCE_LENGTH not in {value.name for value in model.graph.inputs}


def test_the_plan_of_a_source_counts_what_its_bundle_would_hold(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(
        "from tiny_graphs import make_block, make_config\n"
        "def config():\n"
        "    return make_config(make_block({'window': 6}), make_block(), max_positions=4096)\n",
        encoding="utf-8",
    )
    options: dict[str, Any] = {"precision": None, "kv_cache": "auto", "context": None}
    assert planned_source(f"{path}:config", target="cpu", **options).window_layers == (0,)
    assert planned_source(f"{path}:config", target="cuda", **options).window_layers == ()
    assert CPU.moves_rows
    assert not CUDA.moves_rows
