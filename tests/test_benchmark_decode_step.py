"""What a decode step is made of: the command, and the graph in which the prototype of an attention kernel stands."""

import sys
from pathlib import Path

import decode_step
import onnx
import pytest
from decode_step_graph import DOMAIN, HeadShape, with_prototype
from peer_process import PeerError
from step_runs import StepRun, decoding
from tiny_models import HEAD_DIM, HEADS, KV_HEADS, tiny_configs, tiny_model

from graphport.export import export
from graphport.runtime.opening import cpu_session


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model = tiny_model(tiny_configs()["grouped_query"])
    folder = tmp_path_factory.mktemp("steps")
    for cache in ("fp32", "int8"):
        export(model, folder / cache, kv_cache=cache, verify=False)
    return {cache: folder / cache for cache in ("fp32", "int8")}


def test_the_prototype_takes_the_place_of_every_attention(bundles: dict[str, Path]) -> None:
    model = onnx.load(bundles["int8"] / "model.onnx", load_external_data=False)
    attended = [node.output[0] for node in model.graph.node if node.op_type == "If"]
    assert with_prototype(model) == HeadShape(group=HEADS // KV_HEADS, size=HEAD_DIM)
    stood_in = [node for node in model.graph.node if node.domain == DOMAIN]
    assert [node.output[0] for node in stood_in] == attended
    assert len(stood_in) == 2
    assert not [node for node in model.graph.node if node.op_type in ("If", "GroupQueryAttention")]


def test_a_float_cache_keeps_its_kernel(bundles: dict[str, Path]) -> None:
    model = onnx.load(bundles["fp32"] / "model.onnx", load_external_data=False)
    before = model.SerializeToString()
    assert with_prototype(model) is None
    assert model.SerializeToString() == before


def test_another_result_is_refused(bundles: dict[str, Path]) -> None:
    graph = bundles["int8"] / "model.onnx"
    model = onnx.load(graph, load_external_data=False)
    (norm,) = [node for node in model.graph.node if "final_norm.weight" in node.input]
    norm.input[2] = "blocks.0.attention_norm.weight"
    other = graph.with_name("wrong.onnx")
    onnx.save(model, other)
    right, wrong = (StepRun(cpu_session(path), rows=1, capacity=10) for path in (graph, other))
    right.require_like(right, decoding(9), tolerance=0)
    with pytest.raises(PeerError, match=r"after 9: logits differ by .* the prototype is wrong"):
        wrong.require_like(right, decoding(9), tolerance=decode_step.TOLERANCE)


def test_the_table_names_steps_and_shares(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "steps.md"
    options = ["--contexts", "3,8", "--rounds", "1", "--max-others", "1", "--threads", "1", "--out", str(table)]
    monkeypatch.setattr(sys, "argv", ["decode_step.py", *map(str, bundles.values()), *options])
    assert decode_step.main() == 0
    text = table.read_text(encoding="utf-8")
    assert capsys.readouterr().out == text + "\n"
    assert "| after 3, ms | after 8, ms |" in text
    for cache in ("fp32", "int8"):
        assert f"* {cache}, after 8: " in text
    assert "GroupQueryAttention" in text
