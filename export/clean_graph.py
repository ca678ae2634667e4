"""Bring the exported graph into the form that the fusions expect, and tidy what they leave.

In: a graph as torch.onnx wrote it. Out: the same computation without constants to fold, identities, copies and dead
nodes. Moves data only: results stay bit-equal.
"""

import math

import onnx_ir as ir
from onnx_ir.passes import PassManager, common
from onnxscript.optimizer import fold_constants

from graphport.export.graph_pass import CompilePlan, PassReport, only_node, static_dims

_TIDY = (
    common.IdentityEliminationPass(),
    common.CommonSubexpressionEliminationPass(),
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    common.RemoveUnusedNodesPass(),
    common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]  # onnx_ir 1.1 leaves it unannotated
    common.RemoveUnusedOpsetsPass(),
)

_FOLD_INPUT_LIMIT = 1 << 20  # elements: norm weights and rotary tables fold, matrices never (they would be copied)


def clean_graph(model: ir.Model, plan: CompilePlan | None = None) -> PassReport:  # noqa: ARG001 - the shape of a pass
    """Fold constants, drop identities, repeated and dead nodes. Any graph may be cleaned; a plan changes nothing."""
    before = len(model.graph)
    outputs = [value.name for value in model.graph.outputs]
    _keep_weight_names(model.graph)
    limits = {"input_size_limit": _FOLD_INPUT_LIMIT, "output_size_limit": _FOLD_INPUT_LIMIT}
    fold_constants(model, **limits, should_fold=_should_fold)
    PassManager(_TIDY, steps=2)(model)
    _keep_outputs(model.graph, outputs)
    model.graph.sort()
    removed = before - len(model.graph)
    return PassReport(rule="clean", fused=(f"{removed} nodes removed",) if removed else ())


def finish_graph(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Clean, keep one copy of equal initialisers (before, their names told sites apart)."""
    report = clean_graph(model, plan)
    common.DeduplicateInitializersPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    return report


def _should_fold(node: ir.Node) -> bool | None:
    """Whether to fold: not a shared table (a tied head's blocks), which would be stored twice; else as usual."""
    is_shared = any(v is not None and v.is_initializer() and len(v.uses()) > 1 for v in node.inputs)
    return False if is_shared and node.op_type in ("Reshape", "Transpose") else None


def _keep_weight_names(graph: ir.Graph) -> None:
    """A weight that is folded with numbers (1 + weight) leaves its name to the result: reports tell sites by it."""
    for node in graph:
        weights = [v for v in node.inputs if v is not None and v.is_initializer()]
        others = [v for v in node.inputs if v is not None and not v.is_initializer()]
        result = node.outputs[0]
        if len(weights) != 1 or not others or any(only_node(v, "Constant") is None for v in others):
            continue
        name = weights[0].name
        is_small = math.prod(static_dims(weights[0])) <= _FOLD_INPUT_LIMIT
        if name is not None and is_small and len(weights[0].uses()) == 1 and not result.is_graph_output():
            weights[0].name = f"{name}.unfolded"
            result.name = name


def _keep_outputs(graph: ir.Graph, names: list[str | None]) -> None:
    """Give outputs that became one value a name each again: dropping copies merges them."""
    taken: set[ir.Value] = set()
    for index, name in enumerate(names):
        value = graph.outputs[index]
        if value in taken:
            copy = ir.node("Identity", [value])
            copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
            graph.append(copy)
            graph.outputs[index] = value = copy.outputs[0]
        taken.add(value)
        value.name = name
