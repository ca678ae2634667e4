"""Bits matrix by matrix: the smallest graph whose measured divergence stays within a budget.

In: an exported graph, a plan, groups of matrices rounded to 4 bits and what each costs. Out: the plan with the choice,
and the evidence. The graph that is measured is the one that ships, as ONNX Runtime's CPU provider runs it.

A group is `low` (4 bits) or `high` (8 bits, or a GGUF file's own values). Groups rise in the order of divergence a byte
saved; how many must is found by measuring, the sum of the sensitivities saying where to look.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from graphport.export.bundle import write_graph
from graphport.export.gguf_matrices import KeptMatrix
from graphport.export.graph_pass import CompilePlan
from graphport.export.graph_runner import GraphRunner
from graphport.export.parity import compare
from graphport.export.pipeline import compile_graph
from graphport.export.quantize import quantized_bytes
from graphport.export.round_matrices import RoundedGroup
from graphport.export.scratch import scratch_folder
from graphport.export.targets import CPU, TargetError
from graphport.model_def.certificate import Check
from graphport.model_def.signature import GRAPH_FILE

DEFAULT_BUDGET = 0.01  # nats: five times what int8 costs SmolLM2, a thirteenth of int4 rounded to nearest

_MOST_PROBES = 10
_HIGH_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A measured graph: how many groups were high, its divergence in nats and its size in bytes."""

    num_high: int
    kl: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChoice:
    """What was chosen for the matrices `names`, which read one input, and why.

    `sensitivity` is the divergence in nats when they alone are `low`; None where low would not be smaller.
    """

    names: tuple[str, ...]
    form: str
    sensitivity: float | None
    num_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChoice:
    """The evidence: the budget, what the chosen graph measured on `num_tokens`, every probe and every group."""

    max_kl: float
    kl: float
    num_tokens: int
    num_bytes: int
    probes: tuple[Probe, ...]
    groups: tuple[GroupChoice, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What graphs are measured on: ids, the module's logits [S, V] of them, and a folder to write beside."""

    ids: Sequence[int]
    reference: NDArray[np.float32]
    folder: Path


def budget_checks(choice: BudgetChoice | None) -> tuple[Check, ...]:
    """The certificate's line on the budget, none without one."""
    if choice is None:
        return ()
    name = f"budget: {choice.num_tokens} tokens held out from calibration, kl"
    detail = f"{choice.num_bytes / 1e6:.1f} MB; {len(choice.probes)} graphs measured"
    return (Check(name=name, measured=choice.kl, tolerance=choice.max_kl, detail=detail),)


def check_budget(max_kl: float | None, *, chooses_bits: bool) -> float | None:
    """The budget of a precision that chooses bits, None for others; raises ValueError, TargetError."""
    if max_kl is None:
        return DEFAULT_BUDGET if chooses_bits else None
    if not chooses_bits:
        raise TargetError("max_kl is the budget of precision auto: choose --precision auto or leave --max-kl out")
    if isinstance(max_kl, bool) or not isinstance(max_kl, int | float) or not 0 < max_kl < math.inf:
        raise ValueError(f"max_kl must be a positive number of nats, got {max_kl!r}; for example {DEFAULT_BUDGET}")
    return float(max_kl)


def choose_bits(
    exported: ir.Model,
    plan: CompilePlan,
    groups: Sequence[RoundedGroup],
    costs: Sequence[float],
    measurement: Measurement,
    *,
    max_kl: float,
    observe: Callable[[str], None],
) -> tuple[CompilePlan, BudgetChoice]:
    """The plan whose graph is the smallest found with a divergence of at most `max_kl`; `costs` as `sensitivities`.

    Raises TargetError, saying the best reached, when not even the graph with every group high is within.
    """
    candidates = [
        _Candidate(group=group, cost=cost, low=_bytes(group.matrices), high=_high_bytes(group, plan.matrices))
        for group, cost in zip(groups, costs, strict=True)
    ]
    order = sorted((c for c in candidates if c.saved > 0), key=lambda c: c.cost / c.saved, reverse=True)
    probes: dict[int, Probe] = {}

    def measure(num_high: int) -> Probe:
        if num_high not in probes:
            kl, size = _measure(exported, _with_low(plan, order[num_high:]), measurement)
            probes[num_high] = Probe(num_high=num_high, kl=kl, num_bytes=size)
            observe(f"{num_high} of {len(order)} groups above 4 bits: {size / 1e6:.1f} MB, KL {kl:.3g}")
        return probes[num_high]

    chosen = _search(measure, [c.cost for c in order], max_kl=max_kl)
    high = {id(c) for c in order[: chosen.num_high]}
    return _with_low(plan, order[chosen.num_high :]), BudgetChoice(
        max_kl=max_kl,
        kl=chosen.kl,
        num_tokens=len(measurement.ids),
        num_bytes=chosen.num_bytes,
        probes=tuple(probes.values()),
        groups=tuple(c.choice(plan.matrices, is_high=id(c) in high or c.saved <= 0) for c in candidates),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A group, its sensitivity, and its bytes at 4 bits and above."""

    group: RoundedGroup
    cost: float
    low: int
    high: int

    @property
    def saved(self) -> int:
        return self.high - self.low

    def choice(self, kept: Mapping[str, KeptMatrix], *, is_high: bool) -> GroupChoice:
        names = tuple(self.group.matrices)
        held = [kept.get(name) if is_high else self.group.matrices[name] for name in names]
        forms = dict.fromkeys(f"{_HIGH_BITS}-bit/32" if matrix is None else matrix.form for matrix in held)
        return GroupChoice(
            names=names,
            form=", ".join(forms),
            sensitivity=self.cost if self.saved > 0 else None,
            num_bytes=self.high if is_high else self.low,
            other_bytes=self.low if is_high else self.high,
        )


def _search(measure: Callable[[int], Probe], costs: Sequence[float], *, max_kl: float) -> Probe:
    """The probe with the fewest groups high that was measured to hold; `costs` in the order in which groups rise."""
    failed = measure(0)
    if failed.kl <= max_kl:
        return failed
    held = measure(len(costs))
    if not held.kl <= max_kl:
        raise TargetError(
            f"max_kl {max_kl:g} cannot be met: with every matrix at its best the divergence is {held.kl:.3g}; "
            f"choose --max-kl {_rounded_up(held.kl)} or more, or a precision of floats"
        )
    left = np.concatenate([np.cumsum(np.asarray(costs, np.float64)[::-1])[::-1], [0.0]])  # of groups that are low
    for _ in range(_MOST_PROBES):
        if held.num_high - failed.num_high < 2:
            break
        share = (max_kl - held.kl) / (failed.kl - held.kl)
        span = left[failed.num_high] - left[held.num_high]
        wanted = left[held.num_high] + share * span
        guess = int(np.searchsorted(-left, -wanted))  # the fewest whose rest costs no more
        found = measure(min(max(guess, failed.num_high + 1), held.num_high - 1))
        if found.kl <= max_kl:
            held = found
        else:
            failed = found
    return held


def _rounded_up(kl: float) -> str:
    """`kl` in two digits, not below it."""
    if not math.isfinite(kl):
        return str(kl)
    unit = 10.0 ** (math.floor(math.log10(kl)) - 1)
    return f"{math.ceil(kl / unit) * unit:.2g}"


def _with_low(plan: CompilePlan, low: Sequence[_Candidate]) -> CompilePlan:
    rounded = {name: matrix for candidate in low for name, matrix in candidate.group.matrices.items()}
    return dataclasses.replace(plan, matrices={**plan.matrices, **rounded})


def _measure(exported: ir.Model, plan: CompilePlan, measurement: Measurement) -> tuple[float, int]:
    """Divergence and bytes of the compiled graph with a float cache, on the CPU for any target."""
    played = dataclasses.replace(plan, target=CPU, precision=CPU.precision(plan.precision.name), cache=None)
    graph = exported.clone()
    compile_graph(graph, played)
    with scratch_folder(graph, beside=measurement.folder.parent) as scratch:
        write_graph(graph, scratch)
        size = sum(path.stat().st_size for path in scratch.iterdir())
        found = GraphRunner(scratch / GRAPH_FILE, plan.config, optimize=True).logits(measurement.ids)
    return compare(measurement.reference, found).kl, size


def _bytes(matrices: Mapping[str, KeptMatrix]) -> int:
    return sum(matrix.blocks.num_bytes for matrix in matrices.values() if matrix.blocks is not None)


def _high_bytes(group: RoundedGroup, kept: Mapping[str, KeptMatrix]) -> int:
    total = 0
    for name, matrix in group.smoothed.items():
        blocks = kept[name].blocks if name in kept else None
        rows, width = matrix.shape
        if blocks is not None:
            total += blocks.num_bytes
        else:
            total += 4 * rows * width if name in kept else quantized_bytes(rows, width, bits=_HIGH_BITS)
    return total
