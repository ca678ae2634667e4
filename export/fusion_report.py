"""The account of the fusions as data: what each rule changed, and why it left the sites that it left.

In: pass reports. Out: the content of `fusions.json`. Draws nothing (see the command line's tables).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from graphport.export.graph_pass import PassReport
from graphport.export.pipeline import count_fusions
from graphport.export.precision_budget import BudgetChoice

FUSIONS_FORMAT = 1


def fusion_account(
    reports: tuple[PassReport, ...],
    *,
    num_nodes: int,
    advice: tuple[str, ...] = (),
    matrices: Sequence[dict[str, Any]] = (),
    accuracy_level: int | None = None,
    choice: BudgetChoice | None = None,
    sites: Sequence[dict[str, Any]] = (),
    disabled: Sequence[str] = (),
    calibration: str | None = None,
) -> dict[str, Any]:
    """JSON data: `counts` by rule, `rules` with fused sites and misses (site, check, found), `nodes` of the graph.

    `advice`: lines on the kernels that the model's sizes miss. `matrices`: how those of a GGUF file are held.
    `accuracy_level`: MatMulNBits' arithmetic, None where no matrix is quantised or the kernel chooses. `choice`: the
    bits that precision auto chose and why. `sites`: what each place became (`site_account.py`). `disabled`: rules that
    were switched off. `calibration`: name of the text that took the place of the one that ships.
    """
    return {
        "format": FUSIONS_FORMAT,
        "nodes": num_nodes,
        "counts": count_fusions(reports),
        "advice": list(advice),
        "accuracy_level": accuracy_level,
        "matrices": list(matrices),
        "choice": None if choice is None else choice.to_dict(),
        "disabled": list(disabled),
        "calibration": calibration,
        "sites": list(sites),
        "rules": [dataclasses.asdict(report) for report in reports if report.rule != "clean"],
    }
