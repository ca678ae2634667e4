"""Comparing two computations of the same thing: the tables of tolerances, one report when they differ.

In: tensors or arrays of equal shape, the name of a stage. Out: nothing, or an AssertionError that says how far apart
they are. It runs no model (see `tiny_models.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

# Largest absolute difference that a stage may show. Beside each the largest measured over the tests that use it, and
# the smallest that a deliberately broken variant showed.
TOLERANCES: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        # formulas of ours against transformers, torch or double precision
        ("log-mel features", "float32"): 1e-3,  # 3.6e-4: 128 bands of 30 s; broken 0.3 (half a hop late)
        ("rotary tables", "float32"): 1e-5,  # 2.2e-6; broken 0.94
        ("rotation", "float32"): 1e-5,  # 4.3e-6: angles of 50 radians; broken 3.0
        ("rotary distance", "float32"): 2e-5,  # 5.7e-6; broken 1.0
        ("sinusoidal table", "float32"): 1e-6,  # 8.7e-8; broken 0.96
        ("norm", "float32"): 1e-6,  # 1.8e-7; broken 1.6e-3
        ("norm", "float64"): 1e-14,  # 8.9e-16; broken 3.9e-7 (in float32)
        ("attention", "float32"): 5e-6,  # 4.3e-7; broken 0.078
        ("attention", "float64"): 1e-14,  # 2.2e-16; broken 1.4e-7 (in float32)
        ("large scores", "float32"): 1e-5,  # 1.1e-6
        ("large scores", "float16"): 5e-3,  # 1.3e-3
        ("layer", "float32"): 1e-5,  # 2.1e-6; broken 5.2e-4 (tanh for exact GELU)
        ("score variance", "float32"): 0.1,  # 0.01 over 65536 samples; unscaled 7.0
        ("torch layers", "float32"): 1e-5,  # 1.2e-6; broken 2.0
        # logits of one set of weights taken two ways
        ("equal models", "float32"): 1e-4,  # 3.6e-5; broken 1.1
        ("cached", "float32"): 1e-4,  # 3.7e-5; broken 2.5e-3 (tanh for exact GELU)
        # one bundle of rounded activations opened in two ways: pieces of a prompt, packed or as exported
        ("opened otherwise", "float32"): 0.05,  # 4.8e-3: pieces of one token; broken 5.0 (ids reversed)
        # neighbouring stages of one model, on ONNX Runtime's CPU provider
        ("exported", "float32"): 1e-4,  # 4.8e-5
        ("compiled", "float32"): 1e-4,  # 5.4e-5; broken 6.3 (ids shifted by one)
        ("compiled", "float16"): 0.2,  # 0.085, all kinds together 0.18; broken 6.3
        # bundles for CUDA on the CPU against those for the CPU: both round activations to 8 bits, of different floats,
        # and weights half-way between two 4-bit values go to either
        ("int8 for both targets", "float16"): 1.0,  # 0.69; broken 22
        ("int4 for both targets", "float16"): 2.0,  # 1.55; broken 23
        ("quantised, exact activations", "float32"): 1e-4,  # 2.1e-5; unrounded weights 1.4
        ("rounded cache", "float32"): 1e-4,  # 3.3e-5; rows that are not rounded 0.24
        # the runtime on a bundle built by hand, against NumPy in double precision
        ("tiny bundle", "float32"): 1e-4,  # 3e-5; broken 9.0 (positions shifted by one)
        # a bundle on its device against eager in float32: a floor under twice what eager in that precision loses there
        ("on its device", "float32"): 1e-4,  # 5.4e-5, on the CPU
        ("on its device", "float16"): 2e-2,  # not measured on a GPU yet, as the next
        ("on its device", "bfloat16"): 1e-1,
        ("reused cache", "float32"): 1e-5,  # 0: the same kernels on the same rows
        ("log probability", "float32"): 1e-5,  # 4.8e-7
    }
)

# Largest difference relative to the larger of two values (for a model: to its largest logit).
RELATIVE_TOLERANCES: Mapping[tuple[str, str], float] = MappingProxyType(
    {
        ("checkpoint", "float32"): 1e-5,  # 4.2e-6; broken 1e-3
        ("penalty", "float32"): 1e-6,  # 9.7e-8
        ("probability", "float32"): 1e-5,  # 2.0e-6
        ("search score", "float32"): 1e-5,  # 7.3e-7
        ("evaluation", "float32"): 5e-5,  # 7.0e-6: figures of a tiny bundle's logits; broken 6.5e-3 (weights 5 % off)
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far `actual` is from `expected`; `argmax_agreement` is the share of rows whose largest entry agrees."""

    max_abs: float
    mean_abs: float
    worst: tuple[int, ...]
    argmax_agreement: float

    def __str__(self) -> str:
        return (
            f"max difference {self.max_abs:.3g} at {self.worst}, mean {self.mean_abs:.3g}, "
            f"argmax agreement {self.argmax_agreement:.2%}"
        )


def difference(actual: Any, expected: Any) -> Difference:
    """Compare arrays of equal shape; an entry that is finite on one side alone counts as infinitely far."""
    got, want = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert got.shape == want.shape, f"shapes differ: {got.shape} against {want.shape}"
    assert want.size, f"nothing to compare: shape {want.shape}"
    assert np.isfinite(want).all(), "the expected values are not finite"
    gap = np.where(np.isfinite(got), np.abs(got - want), np.inf)
    worst = np.unravel_index(int(gap.argmax()), gap.shape)
    agreement = float((got.argmax(axis=-1) == want.argmax(axis=-1)).mean()) if want.ndim else 1.0
    return Difference(
        max_abs=float(gap.max()),
        mean_abs=float(gap.mean()),
        worst=tuple(int(axis) for axis in worst),
        argmax_agreement=agreement,
    )


def assert_parity(actual: Any, expected: Any, stage: str, *, dtype: str = "float32", what: str = "") -> Difference:
    """Fail unless `actual` is within the stage's tolerance of `expected`; returns the difference."""
    tolerance = TOLERANCES[stage, dtype]
    found = difference(actual, expected)
    assert found.max_abs <= tolerance, f"{stage} ({dtype}) {what}: {found}; tolerance {tolerance:g}"
    return found


def assert_same_choice(actual: Any, expected: Any, stage: str, *, dtype: str = "float32") -> None:
    """Fail unless the best token of logits [..., V] agrees wherever the expected top-2 gap exceeds the tolerance."""
    got, want = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    is_clear = top2_gap(want) > TOLERANCES[stage, dtype]
    assert is_clear.any(), f"no row of {stage} has a clear best token"
    agrees = (got.argmax(axis=-1) == want.argmax(axis=-1)) | ~is_clear
    assert agrees.all(), (
        f"{stage} ({dtype}): best token differs in {int((~agrees).sum())} rows; {difference(got, want)}"
    )


def top2_gap(logits: Any) -> np.ndarray:
    """Best minus second-best entry of each row of [..., V]."""
    best = np.sort(np.asarray(logits, dtype=np.float64), axis=-1)[..., -2:]
    return best[..., 1] - best[..., 0]
