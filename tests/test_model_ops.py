"""The custom ops: schema and fake kernel, the formula, and every way in which a cache or a mask can go wrong."""

from typing import Any

import pytest
import torch
from parity import assert_parity
from torch import Tensor

from graphport.model_def.ops import attend, cached_attention, rms_norm
from graphport.model_def.position_config import RotaryPosition
from graphport.model_def.positions import rotary_tables

HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 6, 2, 8, 12
NAN = float("nan")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(
    *,
    past: list[int],
    num_new: int,
    total: int | None = None,
    fill: float = 0.0,
    rotary: RotaryPosition | None = None,
    seed: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """Arguments of cached_attention for rows with `past` cached tokens; `fill` lies in the cache beyond them."""
    rows = len(past)
    caches = [normal(rows, KV_HEADS, CAPACITY, HEAD_DIM, seed=seed + which) for which in (1, 2)]
    for cache in caches:
        for row, length in enumerate(past):
            cache[row, :, length:] = fill
    tables: tuple[Tensor | None, Tensor | None] = (None, None)
    if rotary is not None:
        tables = rotary_tables(rotary, HEAD_DIM, num_positions=CAPACITY, total_length=CAPACITY)
    lengths = [length + num_new for length in past]
    arguments: dict[str, Any] = {
        "query": normal(rows, num_new, HEADS * HEAD_DIM, seed=seed + 3),
        "key": normal(rows, num_new, KV_HEADS * HEAD_DIM, seed=seed + 4),
        "value": normal(rows, num_new, KV_HEADS * HEAD_DIM, seed=seed + 5),
        "past_key": caches[0],
        "past_value": caches[1],
        "seqlens_k": torch.tensor(lengths, dtype=torch.int32) - 1,
        "total_sequence_length": torch.tensor(max(lengths) if total is None else total, dtype=torch.int32),
        "cos": tables[0],
        "sin": tables[1],
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "scale": 1.0,
        "softcap": 0.0,
        "window": -1,
        "interleaved": False,
    }
    return arguments | changes


ROTARY = RotaryPosition(theta=100.0)
STEPS = {
    "first prompt": {"past": [0, 0], "num_new": 5},
    "one token": {"past": [3, 7, 0], "num_new": 1, "rotary": ROTARY},
    "chunk": {"past": [4], "num_new": 3, "rotary": ROTARY, "interleaved": True},
    "window and cap": {"past": [6, 2], "num_new": 1, "window": 3, "softcap": 2.0, "fill": 5.0},
    "nothing cached, one token": {"past": [0], "num_new": 1},
}


@pytest.mark.parametrize("name", STEPS)
def test_cached_attention_passes_opcheck(name: str) -> None:
    arguments = step(**STEPS[name])  # type: ignore[arg-type]
    torch.library.opcheck(cached_attention, tuple(arguments.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 7), (2, 3, 4, 7)])
def test_rms_norm_passes_opcheck(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.library.opcheck(rms_norm, (normal(*shape).to(dtype), normal(7, seed=1).to(dtype), 1e-6))


def test_the_ops_take_views_and_their_fake_kernels_agree() -> None:
    strided = normal(7, 3, 2).permute(2, 1, 0)
    torch.library.opcheck(rms_norm, (strided, normal(7, seed=1), 1e-6))
    arguments = step(past=[0, 0], num_new=5)
    arguments["query"] = normal(HEADS * HEAD_DIM, 5, 2, seed=3).permute(2, 1, 0)
    arguments["past_key"] = arguments["past_key"].transpose(1, 2).contiguous().transpose(1, 2)
    torch.library.opcheck(cached_attention, tuple(arguments.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_attention_keeps_the_dtype_of_its_inputs(dtype: torch.dtype) -> None:
    arguments = step(past=[3, 5], num_new=1, rotary=ROTARY)
    for name in ("query", "key", "value", "past_key", "past_value"):
        arguments[name] = arguments[name].to(dtype)
    torch.library.opcheck(cached_attention, tuple(arguments.values()))
    assert [output.dtype for output in cached_attention(**arguments)] == [dtype] * 3


def test_rms_norm_equals_torch_and_its_formula() -> None:
    x, weight = normal(2, 3, 7) * 3, 1 + 0.3 * normal(7, seed=1)
    assert_parity(rms_norm(x, weight, 1e-2), torch.nn.functional.rms_norm(x, (7,), weight, 1e-2), "norm")
    wide = x.double()
    formula = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * weight
    assert_parity(rms_norm(x, weight, 1e-2), formula, "norm")
    for broken in (rms_norm(x, weight, 1e-6), rms_norm(x, weight - 1, 1e-2), torch.zeros_like(x)):
        with pytest.raises(AssertionError, match="max difference"):
            assert_parity(broken, formula, "norm")


def test_rms_norm_of_half_precision_has_float32_statistics() -> None:
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # 300^2 overflows float16
    assert torch.equal(rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-6), torch.ones(1, 4, dtype=torch.float16))


def reference(arguments: dict[str, Any], past: list[int]) -> Tensor:
    """softmax(cap(scale q k) masked) v, a row, a head and a position at a time, in double precision."""
    scale, softcap, window = arguments["scale"], arguments["softcap"], arguments["window"]
    rows, num_new, _ = arguments["query"].shape
    output = torch.zeros(rows, num_new, HEADS, HEAD_DIM, dtype=torch.float64)
    for row, length in enumerate(past):
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            columns = slice(kv_head * HEAD_DIM, (kv_head + 1) * HEAD_DIM)
            keys, values = (
                torch.cat((arguments[f"past_{name}"][row, kv_head, :length], arguments[name][row, :, columns])).double()
                for name in ("key", "value")
            )
            for new in range(num_new):
                position = length + new
                first = max(0, position - window + 1) if window > 0 else 0
                query = arguments["query"][row, new, head * HEAD_DIM : (head + 1) * HEAD_DIM].double()
                scores = keys[first : position + 1] @ query * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                output[row, new, head] = torch.softmax(scores, dim=0) @ values[first : position + 1]
    return output.flatten(2)


CASES: list[dict[str, Any]] = [
    {"past": [0, 0], "num_new": 5},
    {"past": [3, 7, 0], "num_new": 1},
    {"past": [4, 4], "num_new": 3, "scale": 0.35},
    {"past": [6, 2], "num_new": 1, "window": 3, "softcap": 2.0},
    {"past": [5], "num_new": 4, "window": 2},
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fill", [0.0, NAN, float("inf"), 1e30])
def test_cached_attention_equals_its_formula_whatever_lies_beyond_the_text(case: dict[str, Any], fill: float) -> None:
    arguments = step(**case, fill=fill)
    attended, present_key, present_value = cached_attention(**arguments)
    assert_parity(attended, reference(arguments, case["past"]), "attention")
    for row, length in enumerate(case["past"]):
        for name, present in (("key", present_key), ("value", present_value)):
            new = arguments[name][row].reshape(-1, KV_HEADS, HEAD_DIM).transpose(0, 1)
            old = arguments[f"past_{name}"][row]
            end = length + case["num_new"]
            expected = torch.cat((old[:, :length], new, old[:, end:]), dim=1)
            assert torch.equal(present[row].nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("case", CASES[1:])
def test_broken_attention_is_rejected(case: dict[str, Any]) -> None:
    arguments = step(**case)
    expected = reference(arguments, case["past"])
    attended = cached_attention(**arguments)[0]
    heads = attended.unflatten(-1, (HEADS, HEAD_DIM))
    broken = {
        "zeros": torch.zeros_like(attended),
        "heads swapped": heads.roll(1, dims=2).flatten(2),
        "window off by one": cached_attention(**(arguments | {"window": max(case.get("window", -1) + 1, 2)}))[0],
        "scale forgotten": cached_attention(**(arguments | {"scale": 0.9 * arguments["scale"]}))[0],
        "one token lost": cached_attention(**(arguments | {"past_value": arguments["past_value"].roll(1, dims=2)}))[0],
    }
    for what, wrong in broken.items():
        with pytest.raises(AssertionError, match="max difference"):
            assert_parity(wrong, expected, "attention", what=what)


@pytest.mark.parametrize("num_new", [1, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_b22_nothing_cached_works_for_prompts_of_one_and_more(num_new: int, rows: int) -> None:
    arguments = step(past=[0] * rows, num_new=num_new, fill=NAN)
    attended, *present = cached_attention(**arguments)
    assert_parity(attended, reference(arguments, [0] * rows), "attention")
    tight = arguments | {name: arguments[name][:, :, :num_new] for name in ("past_key", "past_value")}
    again, *tight_present = cached_attention(**tight)
    assert_parity(again, attended, "attention")
    for wide, narrow in zip(present, tight_present, strict=True):
        assert torch.equal(wide[:, :, :num_new], narrow)


@pytest.mark.parametrize("length", [4, 5, 6, 12])
def test_b24_window_4_sees_the_position_and_three_before(length: int) -> None:
    window = 4
    for spike in range(length):
        arguments = step(past=[0], num_new=length, window=window)
        arguments["value"] = torch.zeros_like(arguments["value"])
        arguments["value"][0, spike] = 1.0
        seen = cached_attention(**arguments)[0][0].abs().sum(-1) > 0
        expected = [0 <= position - spike < window for position in range(length)]
        assert seen.tolist() == expected, f"spike at {spike}"
        for off in (window - 1, window + 1):
            wrong = cached_attention(**(arguments | {"window": off}))[0][0].abs().sum(-1) > 0
            reaches_the_edge = spike + min(off, window) < length
            assert (wrong.tolist() != expected) == reaches_the_edge, f"window {off} must be told from 4"


def masked(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, **changes: Any) -> Tensor:
    fields: dict[str, Any] = {"visible": visible, "bias": None, "scale": 0.3, "softcap": 0.0}
    return attend(queries, keys, values, **(fields | changes))


def heads(length: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(2, HEADS, length, HEAD_DIM, seed=1) * 2,
        normal(2, KV_HEADS, length, HEAD_DIM, seed=2),
        normal(2, KV_HEADS, length, HEAD_DIM, seed=3),
    )


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_b44_a_masked_key_has_no_weight_under_a_softcap(softcap: float) -> None:
    queries, keys, values = heads()
    visible = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    visible[:, :, :, 5:] = False
    expected = masked(queries, keys[:, :, :5], values[:, :, :5], None, softcap=softcap)
    values[:, :, 5:] = 1e30
    assert_parity(masked(queries, keys, values, visible, softcap=softcap), expected, "attention")


def test_b44_the_cap_before_the_mask_is_told_from_the_cap_after_it() -> None:
    queries, keys, values = heads()
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    spread_keys, spread_values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
    scores = queries @ spread_keys.transpose(-1, -2) * 0.3
    minus_infinity = float("-inf")
    right = torch.softmax((5 * torch.tanh(scores / 5)).masked_fill(~visible, minus_infinity), -1) @ spread_values
    wrong = torch.softmax(5 * torch.tanh(scores.masked_fill(~visible, minus_infinity) / 5), -1) @ spread_values
    ours = masked(queries, keys, values, visible, softcap=5.0)
    assert_parity(ours, right, "attention")
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(wrong, right, "attention")


@pytest.mark.parametrize("form", ["bool", "additive"])
def test_b45_a_row_that_sees_nothing_gives_0_and_leaves_the_others_alone(form: str) -> None:
    queries, keys, values = heads()
    visible = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    expected = masked(queries, keys, values, visible)
    blinded = visible.clone()
    blinded[0, :, 2] = False  # one position of row 0, and all of row 1
    blinded[1] = False
    bias = torch.zeros(blinded.shape).masked_fill(~blinded, float("-inf"))
    attended = (
        masked(queries, keys, values, blinded) if form == "bool" else masked(queries, keys, values, None, bias=bias)
    )
    assert torch.isfinite(attended).all()
    assert not attended[0, :, 2].any()
    assert not attended[1].any()
    others = [0, 1, 3, 4, 5, 6]
    assert_parity(attended[0][:, others], expected[0][:, others], "attention")


@pytest.mark.parametrize("size", [1e4, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_b46_masked_keys_have_no_weight_for_scores_of_any_size(size: float, dtype: torch.dtype) -> None:
    queries, keys, values = heads()
    # float16 products must stay below 65504 before the scale is applied
    gain = min(size, 6e4 if dtype == torch.float16 else size) / float(
        (queries @ keys.repeat_interleave(3, 1).mT).abs().max()
    )
    queries, keys = queries * gain**0.5, keys * gain**0.5
    visible = torch.ones(7, 7, dtype=torch.bool).tril()[None, None] & (torch.arange(7) != 4)
    queries, keys, values = (x.to(dtype) for x in (queries, keys, values))
    arguments: dict[str, Any] = {"scale": 1.0}
    expected = masked(queries.double(), keys.double(), values.double(), visible, **arguments)
    values[:, :, 4] = 1e4
    for row in range(6):  # each position with its own future filled with something huge
        poisoned = values.clone()
        poisoned[:, :, row + 1 :] = 1e4
        attended = masked(queries, keys, poisoned, visible, **arguments)[:, :, row]
        assert_parity(attended.float(), expected[:, :, row].float(), "large scores", dtype=str(dtype).split(".")[1])


def test_b46_a_finite_fill_is_told_from_minus_infinity() -> None:
    queries, keys, values = heads()
    queries = queries * 1e5
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    finite = torch.zeros(7, 7).masked_fill(~visible, -10_000.0)
    expected = masked(queries, keys, values, visible)
    with pytest.raises(AssertionError, match="max difference"):
        assert_parity(masked(queries, keys, values, None, bias=finite), expected, "attention")


@pytest.mark.parametrize(
    ("past", "num_new", "total", "message"),
    [
        ([12], 1, 13, r"row 0 has 12 tokens before a step of 1; .* at most 12 \(the cache's capacity\) after"),
        ([2, 10], 3, 13, "row 1 has 10 tokens before a step of 3"),
        ([4, -1], 3, 7, "row 1 has -1 tokens before a step of 3; it needs at least 0 before"),
        ([0], 13, 13, "row 0 has 0 tokens before a step of 13"),
    ],
)
def test_a_step_that_does_not_fit_the_cache_is_refused(past: list[int], num_new: int, total: int, message: str) -> None:
    arguments = step(past=[max(length, 0) for length in past], num_new=num_new, total=total)
    arguments["seqlens_k"] = torch.tensor(past, dtype=torch.int32) + num_new - 1
    with pytest.raises(ValueError, match=message):
        cached_attention(**arguments)
