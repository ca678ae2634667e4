"""Where in a decoder graph the values are that every form of the model has: eager, exported, compiled, quantised.

In: an onnx_ir decoder graph. Out: values by site, in the order of computation. It changes nothing and runs nothing.

A site is where nothing has been folded in that other forms compute elsewhere: what a matrix adds to the residual
stream, not what it reads (smoothing scales that), and keys as they are cached.
"""

import onnx_ir as ir

from graphport.model_def.signature import INPUT_IDS, LOGITS, present_key, present_value

EMBEDDING, FINAL_NORM = "embedding", "final_norm"

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def key_site(layer: int) -> str:
    """Keys of a layer as they are cached, after norm and rotation."""
    return f"layer {layer} attention.key"


def value_site(layer: int) -> str:
    """Values of a layer as they are cached."""
    return f"layer {layer} attention.value"


def output_site(layer: int) -> str:
    """What attention gives, after its output matrix."""
    return f"layer {layer} attention.output"


def down_site(layer: int) -> str:
    """What the feed-forward gives, of experts without what they share."""
    return f"layer {layer} feed_forward.down"


def ordered_sites(num_layers: int) -> tuple[str, ...]:
    """All sites in the order of computation."""
    makers = (key_site, value_site, output_site, down_site)
    return (EMBEDDING, *(make(layer) for layer in range(num_layers) for make in makers), FINAL_NORM, LOGITS)


def site_values(graph: ir.Graph, num_layers: int) -> dict[str, ir.Value]:
    """The value at each site; one that this graph has not (a quantised cache's keys) is left out."""
    found: dict[str, ir.Value | None] = {EMBEDDING: _embedding(graph), FINAL_NORM: _norm(graph, "final_norm.weight")}
    outputs = {value.name: value for value in graph.outputs}
    for layer in range(num_layers):
        found[key_site(layer)] = _float(outputs.get(present_key(layer)))
        found[value_site(layer)] = _float(outputs.get(present_value(layer)))
        found[output_site(layer)] = _product(graph, f"blocks.{layer}.attention.output.")
        owner = f"blocks.{layer}.feed_forward"
        found[down_site(layer)] = _product(graph, f"{owner}.down.") or _product(graph, f"{owner}.experts.down.")
    found[LOGITS] = outputs.get(LOGITS)
    return {site: value for site in ordered_sites(num_layers) if (value := found.get(site)) is not None}


def _float(value: ir.Value | None) -> ir.Value | None:
    return value if value is not None and value.dtype in _FLOATS else None


def _embedding(graph: ir.Graph) -> ir.Value | None:
    """What is looked up for the ids, without the padding that a table in blocks may have."""
    for node in graph:
        if any(value is not None and value.name == INPUT_IDS for value in node.inputs) and "Gather" in node.op_type:
            value = node.outputs[0]
            readers = [use.node for use in value.uses()]
            return readers[0].outputs[0] if [reader.op_type for reader in readers] == ["Slice"] else value
    return None


def _norm(graph: ir.Graph, weight: str) -> ir.Value | None:
    """What the norm with this weight gives; the weight may have one added to it first."""
    readers = [node for node in graph if any(v is not None and v.name == weight for v in node.inputs)]
    while readers and "Norm" not in readers[-1].op_type:
        readers = [use.node for use in readers[-1].outputs[0].uses()]
    return readers[-1].outputs[0] if readers else None


def _product(graph: ir.Graph, prefix: str) -> ir.Value | None:
    """What the matrix called `prefix` gives: with its bias, and with the products that correct a GGUF file's blocks."""
    own = [node for node in graph if any(v is not None and (v.name or "").startswith(prefix) for v in node.inputs)]
    if not own:
        return None
    parts = {output for node in own for output in node.outputs}
    value = own[-1].outputs[0]
    while True:
        sums = [use.node for use in value.uses() if use.node.op_type == "Add" and set(use.node.inputs) <= parts]
        if not sums:
            return value
        value = sums[0].outputs[0]
        parts.add(value)
