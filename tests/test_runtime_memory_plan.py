"""Memory is planned by part, what fits is told exactly, and the plan covers what a process really takes."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import attention, block, decoder

from graphport.runtime.cache_sizes import CacheSizes
from graphport.runtime.memory import MIB
from graphport.runtime.memory_plan import (
    ModelSizes,
    RunLimits,
    longest_that_fits,
    most_rows_that_fit,
    plan_memory,
)

CONFIG = decoder(block())
LIMITS = RunLimits(max_batch=4, max_length=64, prefill_chunk=16)
GPU = ModelSizes(
    config=CONFIG,
    device="cuda",
    weights=100 * MIB,
    blocks=60 * MIB,
    float_type="float16",
    cache_dtype="float16",
    cache=CacheSizes(whole=1000),
    fused_attention=True,
)
CPU = dataclasses.replace(GPU, device="cpu", float_type="float32", cache_dtype="float32")


def test_the_parts_are_what_they_are_called_and_add_up() -> None:
    plan = plan_memory(GPU, LIMITS)
    assert (plan.weights, plan.repacked, plan.cache) == (100 * MIB, 0, 4 * 64 * 1000)
    assert plan.total == plan.weights + plan.workspace + plan.logits + plan.libraries + plan.cache
    assert plan.logits == 2 * 16 * CONFIG.vocab_size * 4  # rows of a piece, and of the piece before
    assert plan.arena_limit == 4 * plan.workspace
    assert plan.parts() == "weights 100.0, workspace 32.0, logits 0.0, libraries 256.0, cache 0.2"
    repacking = plan_memory(dataclasses.replace(GPU, repacked=60 * MIB, timing=MIB), LIMITS)
    assert repacking.total == plan.total + 60 * MIB  # the timing is over before there is a workspace
    assert "repacked 60.0, timing 1.0" in repacking.parts()
    timing = plan_memory(dataclasses.replace(GPU, timing=500 * MIB), LIMITS)
    assert timing.total == plan.weights + plan.libraries + 500 * MIB


def test_the_cpu_packs_blocks_widens_halves_and_loads_no_cuda_libraries() -> None:
    plan = plan_memory(CPU, LIMITS)
    assert (plan.weights, plan.libraries) == (40 * MIB + 78 * MIB, 0)
    widened = plan_memory(dataclasses.replace(CPU, float_type="float16", blocks=0), LIMITS)
    assert widened.weights == 200 * MIB
    assert widened.workspace > plan.workspace


@pytest.mark.parametrize(
    ("max_length", "change"),
    [
        (10**6, {"fused_attention": False}),
        (10**6, {"cache_dtype": "int8"}),
        (64, {"samples": True, "config": dataclasses.replace(CONFIG, vocab_size=10**6)}),
        (64, {"config": dataclasses.replace(CONFIG, vocab_size=10**7)}),
        (64, {"config": dataclasses.replace(CONFIG, hidden_size=400_000)}),
    ],
)
def test_whatever_makes_a_step_larger_makes_its_workspace_larger(max_length: int, change: dict[str, Any]) -> None:
    limits = dataclasses.replace(LIMITS, max_length=max_length)
    workspace, larger = (plan_memory(sizes, limits).workspace for sizes in (GPU, dataclasses.replace(GPU, **change)))
    assert larger > workspace
    assert workspace & (workspace - 1) == larger & (larger - 1) == 0  # powers of two, as the arena's blocks


def test_capped_scores_are_computed_whole_on_the_cpu() -> None:
    capped = dataclasses.replace(CPU, config=decoder(block(of=attention(softcap=20.0))))
    scores = 6 * 16 * 64 * 4  # heads x new tokens x all tokens x bytes
    assert plan_memory(capped, LIMITS).workspace == plan_memory(CPU, LIMITS).workspace + scores


@given(
    sizes=st.sampled_from([GPU, CPU, dataclasses.replace(GPU, fused_attention=False)]),
    free=st.integers(0, 2**30),
    batch=st.integers(1, 1000),
    length=st.integers(1, 100_000),
    chunk=st.integers(1, 1000),
)
def test_what_fits_is_exact(sizes: ModelSizes, free: int, batch: int, length: int, chunk: int) -> None:
    limits = RunLimits(max_batch=batch, max_length=length, prefill_chunk=chunk)
    for name, most in (("max_length", longest_that_fits), ("max_batch", most_rows_that_fit)):
        found, wish = most(sizes, limits, free), getattr(limits, name)
        assert 0 <= found <= wish
        if found:
            assert plan_memory(sizes, dataclasses.replace(limits, **{name: found})).total <= free
        if found < wish:
            assert plan_memory(sizes, dataclasses.replace(limits, **{name: found + 1})).total > free
