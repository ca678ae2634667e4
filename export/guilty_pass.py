"""What moved the logits of a graph that fails its parity: the pass, or the level of ONNX Runtime's optimiser.

In: the graph before the passes, or the one that ships, a text and eager PyTorch's logits of it. Out: words for the
error. It runs only after a failure, on a few tokens, and judges nothing (see `certify.py`).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from graphport.export.bundle import write_graph
from graphport.export.graph_pass import CompilePlan
from graphport.export.graph_runner import GraphRunner, parity_options
from graphport.export.parity import TOLERANCES, Difference, compare
from graphport.export.pipeline import OPTIONAL_PASSES, PASSES, run_pass
from graphport.export.scratch import scratch_folder
from graphport.export.targets import CPU
from graphport.model_def.signature import GRAPH_FILE

NUM_IDS = 32

_LEVELS = {
    "off": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "layout": ort.GraphOptimizationLevel.ORT_ENABLE_LAYOUT,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def guilty_pass(
    exported: ir.Model,
    plan: CompilePlan,
    ids: Sequence[int],
    reference: NDArray[np.float32],
    *,
    beside: Path,
    tolerance: float | None = None,
) -> str:
    """The first pass of `plan`, which is in fp32, after which logits are beyond the tolerance; files go `beside`.

    `tolerance`: of max_abs, by default the table's.
    """
    ids, graph = ids[:NUM_IDS], exported.clone()
    tolerance = TOLERANCES["compiled", "max_abs"] if tolerance is None else tolerance

    def error() -> float:
        with scratch_folder(graph, beside=beside) as folder:
            write_graph(graph, folder)
            runner = GraphRunner(folder / GRAPH_FILE, plan.config, portable=True)
            return compare(reference[: len(ids)], runner.logits(ids)).max_abs

    before = error()
    for graph_pass in PASSES:
        report, rule = run_pass(graph_pass, graph, plan), OPTIONAL_PASSES.get(graph_pass)
        if rule is not None and not report.fused:
            continue
        after = error()
        if not after <= tolerance:  # NaN is beyond it too
            advice = "" if rule is None else f"; without it: --disable-pass {rule}"
            return f"after the pass {graph_pass.__name__} ({before:.3g} before it, {after:.3g} after it{advice})"
        before = after
    return f"after no pass on the first {len(ids)} tokens ({before:.3g} after the last)"


def guilty_level(
    folder: Path,
    plan: CompilePlan,
    ids: Sequence[int],
    reference: NDArray[np.float32],
    *,
    figure: str,
    tolerance: float,
) -> str:
    """The first level of ONNX Runtime's optimiser at which the graph in `folder` is beyond the tolerance."""
    found = optimiser_levels(folder, plan, ids[:NUM_IDS], reference[:NUM_IDS])
    table = ", ".join(f"{level} {getattr(difference, figure):.3g}" for level, difference in found.items())
    for level, difference in found.items():
        if not getattr(difference, figure) <= tolerance:
            what = "with ONNX Runtime's optimiser off too" if level == "off" else f"from its level {level} on"
            return f"{what} ({figure} by level: {table})"
    return f"at no level of ONNX Runtime's optimiser on the first {NUM_IDS} tokens ({figure} by level: {table})"


def optimiser_levels(
    folder: Path, plan: CompilePlan, ids: Sequence[int], reference: NDArray[np.float32]
) -> dict[str, Difference]:
    """How far the graph in `folder` is from `reference` [S, V] on `ids` [S], by level of ONNX Runtime's optimiser."""
    found = {}
    for name, level in _LEVELS.items():
        options = parity_options(optimize=True)
        options.graph_optimization_level = level
        options.enable_mem_reuse = False  # see `graph_runner.open_portable`
        session = ort.InferenceSession(str((folder / GRAPH_FILE).resolve()), options, providers=[CPU.provider])
        found[name] = compare(reference, GraphRunner.over(session, plan.config).logits(ids))
    return found
