"""The matrices of a plan that are rounded on a calibration text, before the graph is compiled.

In: a plan and its exported graph. Out: the plan with them, and for precision auto the evidence of the choice. What is
rounded without a text is left to `lower_linear.py`.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from graphport.export.calibration import Calibration
from graphport.export.certify import eager_logits
from graphport.export.graph_pass import CompilePlan
from graphport.export.precision_budget import BudgetChoice, Measurement, choose_bits
from graphport.export.round_matrices import LOW_BITS, round_groups
from graphport.export.sensitivity import sensitivities
from graphport.model_def.transformer import Transformer

_SENSITIVITY_IDS = 128  # of the text held out: one number a group ranks them, the graphs are measured on all of it


def plan_weights(
    exported: ir.Model,
    plan: CompilePlan,
    model: Transformer,
    calibration: Calibration,
    *,
    max_kl: float | None,
    folder: Path,
    observe: Callable[[str], None],
) -> tuple[CompilePlan, BudgetChoice | None]:
    """`plan` with the matrices that its precision rounds on the calibration text; graphs are measured beside `folder`.

    Raises TargetError when the budget `max_kl` cannot be met, ValueError for what is not finite.
    """
    if plan.precision.weight_bits != LOW_BITS and max_kl is None:
        return plan, None
    observe(f"rounding matrices to {LOW_BITS} bits")
    groups = list(round_groups(exported, plan, model, calibration.windows))
    if max_kl is None:
        rounded = {name: matrix for group in groups for name, matrix in group.matrices.items()}
        return dataclasses.replace(plan, matrices=rounded), None
    costs = []
    for index, cost in enumerate(sensitivities(model, groups, calibration.held_out[:_SENSITIVITY_IDS])):
        if index % max(1, len(groups) // 4) == 0:
            observe(f"measuring sensitivities: {index} of {len(groups)} groups")
        costs.append(cost)
    observe("measuring what the whole model loses")
    ids = calibration.held_out
    measurement = Measurement(ids=ids, reference=eager_logits(model, ids), folder=folder)
    return choose_bits(exported, plan, groups, costs, measurement, max_kl=max_kl, observe=observe)
