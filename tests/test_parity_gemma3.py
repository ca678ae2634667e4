"""Gemma 3 270M (Q4_K_M: Q5_0, Q4_K, Q6_K, Q8_0): the file's values kept, on a text beyond the window of 512."""

import json
from pathlib import Path

import pytest

from graphport.runtime import SamplingParams, load

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.xdist_group("gemma3")]

# Limits that the bundle is shipped under; beside each what was measured.
KL = 0.005  # 0.0018: 8-bit activations
EXACT_KL = 1e-6  # 1.4e-11: exact activations
NUM_EXACT_TOKENS = 96
NUM_TOKENS = 623  # 16 beyond the first rows that are dropped, and so beyond the window


@pytest.fixture(scope="module")
def bundle(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from graphport.export import export

    folder = tmp_path_factory.mktemp("gemma3") / "bundle"
    export(gemma3_gguf, folder, context=2048, require_exact=True)
    return folder


def test_every_matrix_keeps_its_values_and_all_of_a_layer_but_output_and_down_is_packed(bundle: Path) -> None:
    account = json.loads((bundle / "fusions.json").read_text(encoding="utf-8"))
    assert {(row["source"], row["form"], row["max_error"]) for row in account["matrices"]} == {
        ("Q8_0", "8-bit/32", 0.0),
        ("Q5_0", "8-bit/32", 0.0),
        ("Q4_K", "4-bit/32 + minima", 0.0),
        ("Q6_K", "8-bit/16", 0.0),
    }
    assert (account["counts"]["packed_qkv"], account["counts"]["packed_gate_up"]) == (18, 18)
    assert not [rule for rule in account["rules"] if rule["rule"].startswith("packed") and rule["missed"]]


def test_the_certificate_is_within_the_limits_on_a_text_beyond_the_window(bundle: Path) -> None:
    checks = json.loads((bundle / "certificate.json").read_text(encoding="utf-8"))["checks"]
    measured = {check["name"]: check["measured"] for check in checks}
    assert 0 <= measured[f"exact blocks: {NUM_EXACT_TOKENS} tokens, exact activations, kl"] <= EXACT_KL
    assert 0 < measured[f"gguf: {NUM_TOKENS} tokens at once, kl"] <= KL
    for run in (
        "prefill",
        "decode",
        "chunked prefill",
        "ragged batch",
        "rewind",
        "window of 512",
        "rows beyond the window",
    ):
        assert 0 < measured[f"{run}: kl against eager PyTorch"] <= KL


def test_it_goes_on_with_a_text(bundle: Path) -> None:
    params = SamplingParams(max_new_tokens=16, temperature=0.0)
    with load(bundle) as lm:
        (numbers, days) = lm.generate(["1, 2, 3, 4, 5,", "Monday, Tuesday, Wednesday,"], params)
    assert numbers.text.startswith(" 6, 7, 8, 9")
    assert days.text.startswith(" Thursday, Friday, Saturday, Sunday")
