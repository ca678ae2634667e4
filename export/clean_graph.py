"""Bring the exported graph into the form that the fusions expect, and tidy what they leave.

In: a graph as torch.onnx wrote it. Out: the same computation without constants to fold, identities, copies and dead
nodes. Moves data only: results stay bit-equal.
"""

import onnx_ir as ir
from onnx_ir.passes import PassManager, common
from onnxscript.optimizer import fold_constants

from graphport.export.graph_pass import CompilePlan, PassReport

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
    """Fold constants, drop identities, repeated and dead nodes."""
    before = len(model.graph)
    fold_constants(model, input_size_limit=_FOLD_INPUT_LIMIT, output_size_limit=_FOLD_INPUT_LIMIT)
    PassManager(_TIDY, steps=2)(model)
    model.graph.sort()
    removed = before - len(model.graph)
    return PassReport(rule="clean", fused=(f"{removed} nodes removed",) if removed else ())


def finish_graph(model: ir.Model, plan: CompilePlan) -> PassReport:
    """Clean, keep one copy of equal initialisers (before, their names told sites apart)."""
    report = clean_graph(model, plan)
    common.DeduplicateInitializersPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    return report
