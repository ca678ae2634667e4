"""`graphport diff`: the first step, layer and op where two forms of a model part, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import numpy as np
import onnx
import pytest
from certificates import edit_attribute, edit_graph, edit_weight
from onnx import helper

from graphport.cli import main
from graphport.export import export
from graphport.export.first_divergence import SiteError
from graphport.export.graph_sites import ordered_sites
from graphport.export.model_diff import Side, diff_models
from graphport.export.source import open_source
from graphport.export.targets import TargetError

KINDS = ("llama", "gemma", "gpt", "post")
MODULE = "\n".join(
    f"def {kind}():\n    import tiny_graphs\n    return tiny_graphs.tiny_model({kind!r})\n"
    for kind in (*KINDS, "mixed")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources models.py:KIND, and bundles KIND in fp32 and llama_int8."""
    folder = tmp_path_factory.mktemp("diff")
    (folder / "models.py").write_text(MODULE)
    for kind in KINDS:
        export(f"{folder / 'models.py'}:{kind}", folder / kind, precision="fp32", verify=False)
    export(f"{folder / 'models.py'}:llama", folder / "llama_int8", precision="int8", verify=False)
    return folder


def diff(folder: Path, first: str, second: str, **options: object) -> SiteError | None:
    found = diff_models(first.format(folder), second.format(folder), **options)  # type: ignore[arg-type]
    assert found.errors
    return found.first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("first", "second"),
    [("{}", "exported:{}"), ("exported:{}", "compiled:{}"), ("eager:{}", "BUNDLE"), ("BUNDLE", "{}")],
)
def test_every_pair_of_forms_of_one_model_agrees(first: str, second: str, kind: str, folder: Path) -> None:
    names = [
        name.replace("BUNDLE", str(folder / kind)).format(f"{folder / 'models.py'}:{kind}") for name in (first, second)
    ]
    found = diff_models(*names)
    assert found.first is None, found.growth()
    sites = {error.site for error in found.errors}
    assert {
        "embedding",
        "layer 0 attention.key",
        "layer 1 attention.output",
        "layer 1 feed_forward.down",
        "logits",
    } <= sites
    assert {error.step for error in found.errors} == set(range(9))


def test_a_quantised_bundle_stays_within_what_rounding_costs_and_no_less(folder: Path) -> None:
    source = f"{folder / 'models.py'}:llama"
    assert diff(folder, source, "{}/llama_int8") is None
    first = diff(folder, source, "{}/llama_int8", tolerance=1e-4)
    assert first is not None
    assert first.step == 0


def swap_heads(model: onnx.ModelProto) -> None:
    edit_weight(model, "blocks.1.attention.query_key_value.weight_transposed", lambda w: np.roll(w, 16, axis=1))


def scale_down(model: onnx.ModelProto) -> None:
    edit_weight(model, "blocks.0.feed_forward.down.weight_transposed", lambda w: 1.01 * w)


def shift_embedding(model: onnx.ModelProto) -> None:
    edit_weight(model, "embedding.weight", lambda w: np.roll(w, 1, axis=0))


def forget_in_steps(model: onnx.ModelProto) -> None:
    """Layer 1 takes every step that follows another to be one token shorter."""
    graph = model.graph
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(1, np.int32), "fault_one"))
    added = [
        helper.make_node("Shape", ["input_ids"], ["fault_shape"], start=1, end=2),
        helper.make_node("Squeeze", ["fault_shape"], ["fault_new"]),
        helper.make_node("Cast", ["total_sequence_length"], ["fault_total"], to=onnx.TensorProto.INT64),
        helper.make_node("Less", ["fault_new", "fault_total"], ["fault_past"]),
        helper.make_node("Cast", ["fault_past"], ["fault_minus"], to=onnx.TensorProto.INT32),
        helper.make_node("Sub", ["seqlens_k", "fault_minus"], ["fault_seqlens"]),
    ]
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"][1]
    attention.input[list(attention.input).index("seqlens_k")] = "fault_seqlens"
    for node in reversed(added):
        graph.node.insert(0, node)


FAULTS: dict[str, tuple[str, Callable[[onnx.ModelProto], None], int, str]] = {
    "swapped heads in layer 1": ("llama", swap_heads, 0, "layer 1 attention.key"),
    "feed-forward of layer 0 off by a hundredth": ("llama", scale_down, 0, "layer 0 feed_forward.down"),
    "embedding shifted": ("llama", shift_embedding, 0, "embedding"),
    "softcap dropped": (
        "gemma",
        lambda model: edit_attribute(model, "GroupQueryAttention", "softcap", 0.0),
        0,
        "layer 0 attention.output",
    ),
    "a token lost between steps": ("llama", forget_in_steps, 1, "layer 1 attention.key"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_where_it_is(fault: str, folder: Path, tmp_path: Path) -> None:
    kind, change, step, site = FAULTS[fault]
    broken = Path(copytree(folder / kind, tmp_path / "broken"))
    (broken / "certificate.json").write_text("{}")  # rehash writes into it
    edit_graph(broken, change)
    found = diff_models(f"{folder / 'models.py'}:{kind}", str(broken))
    assert found.first is not None
    assert (found.first.step, found.first.site) == (step, site), found.growth()
    growth = found.growth()
    assert growth[-1] == found.first
    assert all(error.relative <= found.tolerance for error in growth[:-1])


def test_the_command_names_the_place_and_its_status_tells(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Path(copytree(folder / "llama", tmp_path / "broken"))
    (broken / "certificate.json").write_text("{}")
    edit_graph(broken, swap_heads)
    assert main(["diff", str(folder / "llama"), str(broken)]) == 1
    out, err = capsys.readouterr()
    assert f"{broken} leaves {folder / 'llama'} at layer 1 attention.key, the prompt: " in out
    assert "layer 0 feed_forward.down" in err
    assert main(["diff", str(folder / "llama"), str(broken), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["first"]["site"] == "layer 1 attention.key"
    assert len(answer["errors"]) == 9 * len(ordered_sites(2))
    assert main(["diff", str(folder / "llama"), str(folder / "llama"), "--tokens", "9", "--steps", "0"]) == 0
    assert "no error above 0.0001; largest 0" in capsys.readouterr().out


def test_other_models_and_impossible_names_are_refused(folder: Path) -> None:
    source = f"{folder / 'models.py'}:llama"
    with pytest.raises(TargetError, match=r"is another model than .*: their configurations differ"):
        diff_models(source, str(folder / "gemma"))
    with pytest.raises(ValueError, match="is a bundle, which has no stage 'exported'"):
        Side.parse(f"exported:{folder / 'llama'}")
    with pytest.raises(ValueError, match="eager PyTorch runs on the CPU here; leave @cuda out"):
        Side.parse(f"{source}@cuda")
    with pytest.raises(ValueError, match="65 tokens do not fit into 64, what both can hold; lower --tokens"):
        diff_models(source, str(folder / "llama"), num_tokens=65)
    with pytest.raises(ValueError, match="8 steps need a text of more tokens than that, got 8"):
        diff_models(source, source, num_tokens=8)
    with pytest.raises(ValueError, match="no model at"):
        diff_models("nowhere", source)


def test_names_say_stage_and_device(folder: Path) -> None:
    assert Side.parse(f"{folder / 'llama'}@cuda").provider == "CUDAExecutionProvider"
    assert Side.parse("compiled:a.gguf@cuda").provider == "CUDAExecutionProvider"
    assert Side.parse("exported:a.py:make").path == "a.py:make"
    assert Side.parse("a.py:make").stage == "eager"
    assert open_source(f"{folder / 'models.py'}:llama", seed=0).model.config.num_layers == 2
