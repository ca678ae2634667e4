"""What each place of a model became: its ops before and after the passes, by which rules, and what they left and why.

In: the exported and the compiled graph, pass reports. Out: JSON data, one record a place (layer 0 attention, layer 0
feed_forward, layer 0 norms, embedding, final_norm, head). It judges nothing.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir

from graphport.export.graph_pass import PassReport, name_site, static_dims
from graphport.model_def.signature import INPUT_IDS

_SHAPE_OPS = ("Constant", "Shape", "Squeeze", "Unsqueeze", "Reshape", "Concat", "Gather", "Slice", "Cast", "Range")


def site_account(exported: ir.Model, compiled: ir.Model, reports: Sequence[PassReport]) -> list[dict[str, Any]]:
    """Records of `place`, ops `before` and `after`, `nodes`, `bytes` of weights, `flops` a token, `rules`, `missed`.

    `rules` names what changed something there; a rule that left a candidate alone is in `missed` with the failed check
    and the value to blame.
    """
    before, after = _by_place(exported.graph), _by_place(compiled.graph)
    places: dict[str, dict[str, Any]] = {}
    for place in {**before, **after}:
        nodes = after.get(place, [])
        places[place] = {
            "place": place,
            "before": [node.op_type for node in before.get(place, []) if node.op_type not in _SHAPE_OPS],
            "after": [node.op_type for node in nodes if node.op_type not in _SHAPE_OPS],
            "nodes": [str(node.name) for node in nodes],
            "bytes": sum(_weight_bytes(nodes)),
            "flops": sum(_flops(node) for node in nodes),
            "rules": [],
            "missed": [],
        }
    for report in reports:
        for site in report.fused:
            record = places.get(place_of(site))
            if record is not None and report.rule not in record["rules"]:
                record["rules"].append(report.rule)
        for miss in report.missed:
            record = places.get(place_of(miss.site))
            if record is not None:
                found = {"rule": report.rule, "site": miss.site, "check": miss.check, "found": miss.found}
                record["missed"].append(found)
    return list(places.values())


def place_of(site: str) -> str:
    """The place that a site of a report belongs to: "layer 3 attention.query" is in "layer 3 attention"."""
    layer = re.match(r"(layer \d+) ?(.*)", site)
    if layer is None:
        return site.split(".", maxsplit=1)[0].split(" ", maxsplit=1)[0]
    name = layer[2]
    if "norm" in name and not name.startswith("attention."):
        return f"{layer[1]} norms"
    return f"{layer[1]} {'feed_forward' if name.startswith('feed_forward') else 'attention'}"


def _by_place(graph: ir.Graph) -> dict[str, list[ir.Node]]:
    """Nodes by place; one that names no weight belongs to the place before it."""
    places: dict[str, list[ir.Node]] = {}
    place = "embedding"
    for node in graph:
        place = _own_place(node) or place
        places.setdefault(place, []).append(node)
    return places


def _own_place(node: ir.Node) -> str | None:
    for value in node.outputs:
        kernel = re.match(r"present\.(\d+)\.key$", value.name or "")
        if kernel:
            return f"layer {kernel[1]} attention"
    names = [value.name or "" for value in node.inputs if value is not None and value.is_initializer()]
    weights = [name for name in names if not name.endswith(".widths")]  # equal ones are one, of whichever layer
    if any("blocks." in name for name in weights):
        return place_of(name_site(next(name for name in weights if "blocks." in name)))
    if any(name.startswith("final_norm") for name in weights):
        return "final_norm"
    if any(value is not None and value.name == INPUT_IDS for value in node.inputs) and "Gather" in node.op_type:
        return "embedding"
    is_product = node.op_type in ("MatMul", "Gemm", "MatMulNBits", "Linear")
    heads = ("embedding.", "head.", "masked_head.")
    return "head" if is_product and any(name.startswith(heads) for name in weights) else None


def _weight_bytes(nodes: Sequence[ir.Node]) -> Iterator[int]:
    seen: set[str] = set()
    for node in nodes:
        for value in node.inputs:
            tensor = None if value is None or not value.is_initializer() else value.const_value
            if tensor is not None and str(tensor.name) not in seen:
                seen.add(str(tensor.name))
                yield tensor.nbytes


def _flops(node: ir.Node) -> int:
    """Of the matrix products of one token; attention depends on the length and is left out."""
    if node.op_type == "MatMulNBits":
        return 2 * node.attributes["N"].as_int() * node.attributes["K"].as_int()
    if node.op_type in ("MoE", "QMoE"):
        return _expert_flops(node)
    if node.op_type not in ("MatMul", "Gemm") or node.inputs[1] is None or not node.inputs[1].is_initializer():
        return 0
    rows, columns = static_dims(node.inputs[1])
    return 2 * rows * columns


def _expert_flops(node: ir.Node) -> int:
    """Of the experts that one token runs: the second matrix of each has half the values of the first."""
    first = node.inputs[2]
    assert first is not None
    _, rows, width = static_dims(first)
    if node.op_type == "QMoE":
        width = width * 8 // node.attributes["expert_weight_bits"].as_int()
    return 3 * node.attributes["k"].as_int() * rows * width
