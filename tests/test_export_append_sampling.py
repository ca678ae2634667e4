"""The reductions of the logits in the graph: right for every row, and only for targets that ask for them."""

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from parity import TOLERANCES
from sampling_bundles import SAMPLING, sampling_plan
from tiny_bundles import tiny_config
from tiny_logits import random_logits
from tiny_models import tiny_configs, tiny_model

from graphport.export.append_sampling import append_sampling
from graphport.export.graph_pass import CompilePlan
from graphport.export.pipeline import compile_graph, count_fusions, expected_fusions
from graphport.export.targets import CPU, CUDA
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.signature import (
    GREEDY_IDS,
    LOG_TOTAL,
    LOGITS,
    NEXT_SEQLENS_K,
    NUM_CANDIDATES,
    SEQLENS_K,
    TOP_IDS,
    TOP_LOGITS,
    decoder_signature,
)

TOLERANCE = TOLERANCES["log probability", "float32"]
VOCAB = 5000

Arrays = dict[str, np.ndarray[Any, Any]]


def reduce(logits: np.ndarray[Any, Any], lengths: list[int] | None = None) -> Arrays:
    """What the pass makes of logits [R, V] that are an input of the graph."""
    size = logits.shape[1]
    rows, name = ir.Shape(["rows", size]), ir.TensorType(ir.DataType.FLOAT)
    x, copy = ir.Value(name="x", type=name, shape=rows), ir.Value(name=LOGITS, type=name, shape=rows)
    seqlens = ir.Value(name=SEQLENS_K, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["batch"]))
    head = ir.node("Identity", [x], outputs=[copy])
    model = ir.Model(ir.Graph([x, seqlens], [copy], nodes=[head], opset_imports={"": 23}), ir_version=10)
    report = append_sampling(model, sampling_plan(dataclasses.replace(tiny_config(), vocab_size=size)))
    assert report.fused == (LOGITS,)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=[CPU.provider])
    outputs = session.run(None, {"x": logits, SEQLENS_K: np.array(lengths or [0], np.int32)})
    return dict(zip((output.name for output in session.get_outputs()), outputs, strict=True))


def rows_of(*rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.stack(rows).astype(np.float32)


def test_each_row_is_reduced_to_what_numpy_says() -> None:
    logits = rows_of(
        *(
            random_logits(seed, VOCAB, scale) + shift
            for seed, (scale, shift) in enumerate(((0.1, 0), (3, 0), (3, 500), (30, -500), (1e4, 0), (3e37, 0)))
        )
    )
    found = reduce(logits)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :NUM_CANDIDATES]
    assert (found[LOGITS] == logits).all()
    assert (found[TOP_LOGITS] == np.take_along_axis(logits, order, 1)).all()
    assert (np.take_along_axis(logits, found[TOP_IDS], 1) == found[TOP_LOGITS]).all()
    assert (found[GREEDY_IDS][:, 0] == logits.argmax(1)).all()
    wide = logits.astype(np.float64)
    totals = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1))
    assert np.abs(found[LOG_TOTAL] - totals).max() < TOLERANCE
    assert {name: value.dtype.name for name, value in found.items()} == {
        LOGITS: "float32",
        GREEDY_IDS: "int64",
        LOG_TOTAL: "float32",
        TOP_LOGITS: "float32",
        TOP_IDS: "int64",
        NEXT_SEQLENS_K: "int32",
    }


def test_the_greedy_id_is_the_lowest_of_equals() -> None:
    logits = rows_of(np.zeros(VOCAB), np.zeros(VOCAB), np.full(VOCAB, -np.inf))
    logits[1, [4000, 17, 300]] = 3
    logits[2, 4321] = -1e30
    assert reduce(logits)[GREEDY_IDS][:, 0].tolist() == [0, 17, 4321]


@pytest.mark.parametrize("place", [0, 63, 64, VOCAB - 1])
@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf])
def test_b50_a_row_that_is_not_finite_has_a_total_that_is_not(number: float, place: int) -> None:
    logits = rows_of(*(random_logits(seed, VOCAB) for seed in range(3)))
    logits[1, place] = number
    assert np.isfinite(reduce(logits)[LOG_TOTAL]).tolist() == [True, False, True]


def test_b50_ids_that_can_never_come_are_no_fault_but_a_row_of_nothing_else_is() -> None:
    logits = rows_of(random_logits(0, VOCAB), np.full(VOCAB, -np.inf))
    logits[0, 5:] = -np.inf
    found = reduce(logits)
    assert np.isfinite(found[LOG_TOTAL]).tolist() == [True, False]
    assert found[TOP_LOGITS][0, 5] == -np.inf


def test_a_small_vocabulary_has_as_many_candidates_as_ids() -> None:
    logits = rows_of(random_logits(3, 37))
    found = reduce(logits)
    assert found[TOP_IDS].shape == (1, 37)
    assert (np.sort(found[TOP_IDS]) == np.arange(37)).all()


def test_lengths_go_on_by_one_and_rows_of_one_token_stay() -> None:
    assert reduce(rows_of(np.zeros(70)), [0, 1, 2, 500])[NEXT_SEQLENS_K].tolist() == [0, 2, 3, 501]


def test_no_rows_at_all_are_reduced_to_none() -> None:
    assert reduce(np.zeros((0, 70), np.float32))[TOP_IDS].shape == (0, NUM_CANDIDATES)


@pytest.mark.parametrize("kind", ["grouped_query", "head_dim_20", "tied_head_bias", "logit_softcap"])
def test_the_compiled_graph_ends_with_the_outputs_of_its_signature(kind: str) -> None:
    model = tiny_model(tiny_configs()[kind])
    plan = CompilePlan(config=model.config, target=SAMPLING, precision=SAMPLING.precision("fp32"), max_length=64)
    graph = torch_to_onnx(CachedDecoder(model, max_length=64), decoder_signature(model.config))
    reports = compile_graph(graph, plan)
    assert count_fusions(reports)["sampling"] == expected_fusions(plan)["sampling"] == 1
    signature = decoder_signature(model.config, samples=True)
    assert [value.name for value in graph.graph.outputs] == [spec.name for spec in signature.outputs]
    shapes = {value.name: value.shape for value in graph.graph.outputs}
    assert [tuple(map(str, shapes[spec.name] or ())) for spec in signature.outputs] == [
        tuple(map(str, spec.shape)) for spec in signature.outputs
    ]


def test_targets_on_the_host_keep_their_logits_as_they_are() -> None:
    assert not CPU.samples_on_device
    assert CUDA.samples_on_device
    plan = CompilePlan(config=tiny_config(), target=CPU, precision=CPU.precision("fp32"), max_length=64)
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 23}), ir_version=10)
    assert append_sampling(model, plan).fused == ()
    assert len(model.graph) == 0
    assert expected_fusions(plan)["sampling"] == 0
