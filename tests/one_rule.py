"""One pass applied to a graph built by hand, with the numbers before and after.

In: a pass, a graph, sometimes a feed. Out: its report; an AssertionError when names or values changed.
"""

from typing import Any

import numpy as np
import onnx_ir as ir
from parity import TOLERANCES
from tiny_graphs import Feed, make_config, make_plan, run_graph

from graphport.export.graph_pass import GraphPass, PassReport

WIDTH = 8
SHAPE = ("batch", "time", WIDTH)
TOLERANCE = TOLERANCES["compiled", "float32"]
PLAN = make_plan(make_config())


def apply(rule: GraphPass, model: ir.Model, *, tolerance: float = TOLERANCE, plan: Any = PLAN) -> PassReport:
    """Run one pass; outputs keep their names and, within `tolerance`, their values."""
    random = np.random.default_rng(0)
    dims = {"batch": 2, "time": 3}
    feed = {
        value.name: random.standard_normal([d if isinstance(d, int) else dims[str(d)] for d in value.shape]).astype(
            "f4"
        )
        for value in model.graph.inputs
    }
    return apply_on(rule, model, feed, tolerance=tolerance, plan=plan)


def apply_on(rule: GraphPass, model: ir.Model, feed: Feed, *, tolerance: float, plan: Any = PLAN) -> PassReport:
    before = run_graph(model, feed)
    report = rule(model, plan)
    after = run_graph(model, feed)
    assert list(after) == list(before)
    for name, value in before.items():
        kept = ~np.isnan(value)
        assert np.abs(after[name][kept] - value[kept]).max() <= tolerance
    return report
