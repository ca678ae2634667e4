"""The torch module as an ONNX graph: axes that vary, outputs as declared, fused nodes that run anywhere."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from parity import TOLERANCES
from tiny_graphs import (
    CONFIGS,
    count_ops,
    decoder_feed,
    eager_step,
    exported,
    interface,
    largest_difference,
    open_graph,
    run_graph,
    signature,
    tensor,
    tiny_model,
)
from torch import Tensor, nn

from graphport.export.clean_graph import clean_graph
from graphport.export.torch_to_onnx import IR_VERSION, OPSET, ExportError, torch_to_onnx

TOLERANCE = TOLERANCES["exported", "float32"]
SHAPES = ((1, 1), (1, 7), (3, 2), (5, 33))
HEADS, WIDTH = 4, 24


class EncoderLayer(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.5, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class SelfAttention(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=batch_first)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, x, x, need_weights=True)


class ManyOutputs(nn.Module):
    """Logits, hidden states, attention weights, a buffer, an input passed through, one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("table", torch.arange(6.0).reshape(2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.relu(self.linear(x))
        attended, weights = self.attention(hidden, hidden, hidden)
        return self.linear(attended), hidden, weights, self.table, x, attended, attended


def int_constants(model: ir.Model) -> set[int]:
    nodes = [node.attributes["value"].as_tensor() for node in model.graph if node.op_type == "Constant"]
    tensors = [*nodes, *(v.const_value for v in model.graph.initializers.values())]
    return {
        int(i)
        for t in tensors
        if t is not None and t.dtype in (ir.DataType.INT64, ir.DataType.INT32)
        for i in t.numpy().flat
    }


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [EncoderLayer, SelfAttention])
def test_b01_declared_axes_vary_in_torchs_own_attention(kind: Any, batch_first: bool) -> None:
    torch.manual_seed(0)
    module = kind(batch_first=batch_first).eval()
    axes = ("batch", "time") if batch_first else ("time", "batch")
    outputs = [tensor("y", *axes, WIDTH), tensor("weights", "batch", "time", "time")][
        : 2 if kind is SelfAttention else 1
    ]
    graph = torch_to_onnx(module, signature(tensor("x", *axes, WIDTH), *outputs))
    clean_graph(graph)
    session = open_graph(graph)
    for batch, time in SHAPES:
        x = torch.randn((batch, time, WIDTH) if batch_first else (time, batch, WIDTH))
        with torch.inference_mode():
            wanted = module(x)
        for found, want in zip(
            session.run(None, {"x": x.numpy()}), wanted if len(outputs) > 1 else [wanted], strict=True
        ):
            assert np.abs(found - want.numpy()).max() <= TOLERANCE
    # the example has batch 3 and time 5; neither time nor a product with the heads may be a number in the graph
    assert not int_constants(graph) & {5, 3 * HEADS, 5 * HEADS, 3 * 5}


class ViewsBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(3, -1) + 1


class ReadsTime(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * int(x.shape[1])


class BranchesOnTime(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[1] > 2 else x * 2


class BranchesOnData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 2 else x * 2


@pytest.mark.parametrize(
    ("module", "axis"),
    [
        (ViewsBatch(), r"axis 0 \(batch\) of x"),
        (ReadsTime(), r"axis 1 \(time\) of x"),
        (BranchesOnTime(), r"axis 1 \(time\) of x"),
    ],
)
def test_b01_an_axis_that_froze_is_named(module: nn.Module, axis: str) -> None:
    with pytest.raises(ExportError, match=axis):
        torch_to_onnx(module, signature(tensor("x", "batch", "time"), tensor("y", "batch", "time")))


def test_a_module_that_branches_on_data_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExportError, match="cannot be traced"):
        torch_to_onnx(BranchesOnData(), signature(tensor("x", "batch"), tensor("y", "batch")))
    capfd.readouterr()  # torch prints the graph so far


class Flat(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.flatten(1), x + 1, x + 2, x + 3, x + 4


def test_an_output_unlike_its_declaration_is_refused() -> None:
    shape = ("batch", 2, 3)
    outputs = (
        tensor("a", "batch", "width"),
        tensor("b", *shape, dtype="int64"),
        tensor("c", "batch", 6),
        tensor("d", "other", 2, 3),
        tensor("e", *shape),
    )
    with pytest.raises(ExportError, match="outputs differ from their declaration") as error:
        torch_to_onnx(Flat(), signature(tensor("x", *shape), *outputs))
    for reason in (
        "a is float32 [batch, 6], declared float32 ['batch', 'width']",
        "b is float32 [batch, 2, 3], declared int64",
        "c is float32 [batch, 2, 3], declared float32 ['batch', 6]",
        "d is float32 [batch, 2, 3], declared float32 ['other', 2, 3]",
    ):
        assert reason in str(error.value)
    assert "e is" not in str(error.value)


def test_a_signature_with_another_number_of_outputs_is_refused() -> None:
    with pytest.raises(ExportError, match="1 inputs and 5 outputs, the signature names 1 and 2"):
        torch_to_onnx(Flat(), signature(tensor("x", "batch", 2, 3), tensor("y", "batch", 6), tensor("z", "batch", 6)))


@pytest.mark.parametrize("lengths", [(0, 0, 0, 0), (1, 1, 1, 1), (9, 0, 1, 4), (0,), (9,)])
@pytest.mark.parametrize("num_new", [1, 5])
def test_b02_any_batch_and_any_past_run(lengths: tuple[int, ...], num_new: int) -> None:
    model, feed = tiny_model("llama"), decoder_feed(CONFIGS["llama"], lengths, num_new)
    assert largest_difference(run_graph(exported("llama"), feed), eager_step(model, feed), feed) <= TOLERANCE


def test_b05_eval_mode_is_for_the_export_alone() -> None:
    torch.manual_seed(0)
    module = EncoderLayer(batch_first=True).train()
    module.layer.norm1.eval()
    modes = [part.training for part in module.modules()]
    graph = torch_to_onnx(module, signature(tensor("x", "batch", "time", WIDTH), tensor("y", "batch", "time", WIDTH)))
    assert [part.training for part in module.modules()] == modes
    assert True in modes
    assert False in modes
    assert "Dropout" not in count_ops(graph)
    x = np.random.default_rng(0).standard_normal((2, 6, WIDTH)).astype(np.float32)
    first, second = run_graph(graph, {"x": x})["y"], run_graph(graph, {"x": x})["y"]
    assert np.array_equal(first, second)
    with torch.inference_mode():
        assert np.abs(first - module.eval()(torch.from_numpy(x)).numpy()).max() <= TOLERANCE
        assert np.abs(first - module.train()(torch.from_numpy(x)).numpy()).max() > 5 * TOLERANCE


def test_b05_modes_come_back_after_a_failed_export() -> None:
    module = ViewsBatch().train()
    with pytest.raises(ExportError):
        torch_to_onnx(module, signature(tensor("x", "batch", "time"), tensor("y", "batch", "time")))
    assert module.training


@pytest.mark.parametrize("length", [16, 7])
def test_b06_head_counts_are_the_modules_when_axes_coincide(length: int) -> None:
    graph, config = exported("llama"), CONFIGS["llama"]
    nodes = [node for node in graph.graph if node.op_type == "RotaryCachedAttention"]
    assert [(n.attributes["num_heads"].as_int(), n.attributes["kv_num_heads"].as_int()) for n in nodes] == [(4, 2)] * 2
    feed = decoder_feed(config, (0,), length)
    assert largest_difference(run_graph(graph, feed), eager_step(tiny_model("llama"), feed), feed) <= TOLERANCE


class FourAxes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_b06_attention_over_four_axes_has_the_modules_heads() -> None:
    shape = ("batch", 4, "time", 16)
    graph = torch_to_onnx(FourAxes(), signature(tensor("x", *shape), tensor("y", *shape)))
    for node in graph.graph:
        if node.op_type == "Attention" and "q_num_heads" in node.attributes:
            assert node.attributes["q_num_heads"].as_int() == 4
    torch.manual_seed(0)
    for time in (16, 7):
        x = torch.randn(2, 4, time, 16) * 3
        found = run_graph(graph, {"x": x.numpy()})["y"]
        assert np.abs(found - FourAxes()(x).numpy()).max() <= TOLERANCE


def test_b64_every_kind_of_output_keeps_name_order_type_and_values() -> None:
    torch.manual_seed(0)
    module = ManyOutputs().eval()
    hidden = ("batch", "time", 8)
    names = {"logits": hidden, "hidden": hidden, "weights": ("batch", "time", "time"), "table": (2, 3)}
    names |= {"same": hidden, "attended": hidden, "attended_again": hidden}
    graph = torch_to_onnx(module, signature(tensor("x", *hidden), *(tensor(n, *s) for n, s in names.items())))
    before = interface(graph)
    assert [entry[1] for entry in before] == ["x", *names]
    x = torch.randn(2, 5, 8)
    with torch.inference_mode():
        wanted = [value.numpy() for value in module(x)]
    raw = run_graph(graph, {"x": x.numpy()})
    clean_graph(graph)
    assert interface(graph) == before
    for outputs in (raw, run_graph(graph, {"x": x.numpy()})):
        assert list(outputs) == list(names)
        for found, want in zip(outputs.values(), wanted, strict=True):
            assert np.abs(found - want).max() <= TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_the_exported_graph_runs_as_it_is_and_equals_eager(name: str) -> None:
    graph, config, model = exported(name), CONFIGS[name], tiny_model(name)
    used = {(node.domain, node.op_type) for node in graph.graph if node.domain == "graphport"}
    assert used <= {(domain, op_type) for domain, op_type, _ in graph.functions}
    session = open_graph(graph)
    for lengths, num_new in (((0,), 11), ((0, 0, 0), 5), ((9, 3, 1), 1), ((9, 0, 4), 3), ((17,), 20)):
        feed = decoder_feed(config, lengths, num_new)  # caches are NaN beyond each row's text
        wanted = eager_step(model, feed)
        found = dict(zip(wanted, session.run(None, feed), strict=True))
        assert largest_difference(found, wanted, feed) <= TOLERANCE


@pytest.mark.parametrize("shift", ["seqlens_k", "past_key_values.1.key"])
def test_a_shifted_position_and_swapped_heads_are_seen(shift: str) -> None:
    feed = decoder_feed(CONFIGS["llama"], (9, 9), 1)
    wanted = eager_step(tiny_model("llama"), feed)
    broken = {**feed, shift: feed[shift] - 1 if shift == "seqlens_k" else feed[shift][:, ::-1]}
    found = run_graph(exported("llama"), broken)["logits"]
    assert np.abs(found - wanted["logits"]).max() > 500 * TOLERANCE


def test_b89_opset_and_ir_version_are_what_onnx_runtime_accepts() -> None:
    proto = onnx.load_from_string(ir.to_proto(exported("llama")).SerializeToString())
    assert (OPSET, IR_VERSION) == (23, 10)
    assert proto.ir_version == IR_VERSION
    versions = {entry.domain: entry.version for entry in proto.opset_import}
    assert versions[""] == OPSET
    assert all({e.domain: e.version for e in f.opset_import}.get("", OPSET) == OPSET for f in proto.functions)


def test_too_many_dynamic_dimensions_are_refused() -> None:
    names = [f"axis{i}" for i in range(9)]
    with pytest.raises(ExportError, match=r"9 dynamic dimensions .*at most 8"):
        torch_to_onnx(Flat(), signature([tensor(f"x{n}", n) for n in names], tensor("y", 1)))


def test_weights_keep_their_parameters_names() -> None:
    parameters = {name for name, _ in tiny_model("gpt").named_parameters()}
    assert parameters <= set(exported("gpt").graph.initializers)
