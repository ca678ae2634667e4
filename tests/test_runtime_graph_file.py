"""The header of a graph file says of its nodes and tensors what the onnx package says."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tiny_bundles import LAYERS, tiny_model, tiny_weights, write_tiny_bundle

from graphport.model_def.signature import GRAPH_FILE, DType
from graphport.runtime.graph_file import NodeHeader, read_graph_header


@pytest.mark.parametrize("floats", ["float32", "float16", "bfloat16"])
def test_nodes_and_tensors_are_those_of_the_onnx_package(tmp_path: Path, floats: DType) -> None:
    write_tiny_bundle(tmp_path, floats=floats)
    header = read_graph_header(tmp_path / GRAPH_FILE)
    graph = onnx.load(tmp_path / GRAPH_FILE).graph
    assert sorted(header.nodes, key=str) == sorted(
        (
            NodeHeader(
                op_type=node.op_type,
                domain=node.domain,
                inputs=tuple(node.input),
                integers={a.name: a.i for a in node.attribute if a.type == onnx.AttributeProto.INT},
            )
            for node in graph.node
        ),
        key=str,
    )
    assert {name: (tensor.element_type, tensor.num_bytes) for name, tensor in header.tensors.items()} == {
        tensor.name: (tensor.data_type, len(tensor.raw_data)) for tensor in graph.initializer
    }
    for tensor in graph.initializer:
        place = header.tensors[tensor.name].place
        assert place is not None
        assert place.length is not None
        data = (tmp_path / (place.location or GRAPH_FILE)).read_bytes()
        assert data[place.offset : place.offset + place.length] == tensor.raw_data
    assert header.float_type == floats
    attentions = header.nodes_of("GroupQueryAttention")
    assert len(attentions) == LAYERS
    assert [attentions[0].has_input(index) for index in (0, 1, 8, 9)] == [True, False, True, False]


def test_nodes_of_subgraphs_and_functions_are_seen(tmp_path: Path) -> None:
    model = tiny_model(tiny_weights())
    inner = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.zeros(2, np.float16), "t"))
    branch = helper.make_graph([inner], "branch", [], [])
    model.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch))
    body = helper.make_node("Scan", [], ["z"], first=-3)
    model.functions.append(helper.make_function("local", "f", [], ["z"], [body], [helper.make_opsetid("", 23)]))
    (tmp_path / GRAPH_FILE).write_bytes(model.SerializeToString())
    header = read_graph_header(tmp_path / GRAPH_FILE)
    assert len(header.nodes_of("Constant")) == 2
    assert header.nodes_of("Scan") == [NodeHeader(op_type="Scan", domain="", inputs=(), integers={"first": -3})]
    assert (header.tensors["t"].element_type, header.tensors["t"].num_bytes) == (onnx.TensorProto.FLOAT16, 4)
    assert header.float_type == "float16"
