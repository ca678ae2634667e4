"""What the report says of sizes that miss a target's fastest kernels."""

import json
from pathlib import Path

import pytest
from tiny_graphs import CONFIGS, compiled, make_plan
from tiny_models import attention, block, decoder, tiny_model

from graphport.cli_report import print_report, read_report
from graphport.export.kernel_advice import kernel_advice
from graphport.export.model_export import export
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import FUSIONS_FILE


def config_of(num_heads: int, num_kv_heads: int, head_dim: int, softcap: float | None = None) -> TransformerConfig:
    heads = attention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, softcap=softcap)
    return decoder(block(of=heads), block(of=heads))


def advice_of(
    config: TransformerConfig,
    folder: Path,
    *,
    target: str = "cuda",
    precision: str = "fp16",
    kv_cache: str = "auto",
) -> list[str]:
    bundle = export(
        tiny_model(config), folder / "bundle", target=target, precision=precision, kv_cache=kv_cache, verify=False
    )
    account = json.loads((bundle.path / FUSIONS_FILE).read_text())
    assert list(bundle.notes)[-len(account["advice"]) :] == account["advice"] or not account["advice"]
    advice: list[str] = account["advice"]
    return advice


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((4, 2, 64), []),
        ((4, 4, 128), []),
        ((3, 1, 64), ["3 query heads share a key/value head, which is not one of 1, 2, 4, 5, 8, 16, 32"]),
        ((4, 2, 96), ["head size 96 is not one of 64, 128, 256"]),
        ((6, 1, 80), ["head size 80 is not one of", "6 query heads share"]),
    ],
)
def test_sizes_that_miss_the_fast_decode_kernel_are_named(
    sizes: tuple[int, int, int], wanted: list[str], tmp_path: Path
) -> None:
    advice = advice_of(config_of(*sizes), tmp_path)
    assert len(advice) == len(wanted)
    for line, part in zip(advice, wanted, strict=True):
        assert line.startswith("every layer: decoding misses XQA, ")
        assert part in line


def test_capped_scores_miss_it_too(tmp_path: Path) -> None:
    assert advice_of(config_of(4, 2, 64, softcap=5.0), tmp_path) == [
        "every layer: decoding misses XQA, scores are capped at 5"
    ]


def test_a_quantised_cache_narrows_the_groups_and_costs_more_where_they_are_missed(tmp_path: Path) -> None:
    assert advice_of(config_of(8, 2, 64), tmp_path / "four", kv_cache="int8") == []
    (line,) = advice_of(config_of(4, 2, 64), tmp_path / "two", kv_cache="int8")
    assert line.startswith("every layer: decoding misses XQA, 2 query heads share a key/value head")
    assert line.endswith("not one of 4, 8, 16, 32; the int8 cache is widened at every step")


def test_layers_that_differ_are_listed(tmp_path: Path) -> None:
    fast = block(of=attention(num_heads=4, num_kv_heads=2, head_dim=64))
    slow = block(of=attention(num_heads=6, num_kv_heads=2, head_dim=64))
    (line,) = advice_of(decoder(slow, fast, slow), tmp_path)
    assert line.startswith("layers 0, 2: decoding misses XQA, 3 query heads")


def test_the_cpu_has_no_such_preference(tmp_path: Path) -> None:
    assert advice_of(config_of(3, 1, 80), tmp_path, target="cpu", precision="fp32") == []


def test_rows_that_miss_the_compact_gemm_are_counted(tmp_path: Path) -> None:
    advice = advice_of(config_of(4, 2, 64), tmp_path, precision="int4")
    missed = [line for line in advice if "compact GEMM" in line]
    assert missed
    assert all("multiples of 64" in line or "multiples of 32" in line for line in missed)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_widths_that_are_no_multiple_of_the_block_are_named_with_what_they_cost(precision: str) -> None:
    model, _ = compiled("llama", precision)  # width 48; 40 in the feed-forward
    advice = kernel_advice(model, make_plan(CONFIGS["llama"], precision))
    bits = precision.removeprefix("int")
    filled = "no multiple of 32: the last block is filled with zeros"
    assert f"2 {bits}-bit products of width 40, {filled}, 60% more bytes" in advice
    assert any(line.endswith(f"products of width 48, {filled}, 33% more bytes") for line in advice)
    whole, _ = compiled("llama", "fp32")
    assert not kernel_advice(whole, make_plan(CONFIGS["llama"], "fp32"))


def test_the_report_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    advice = advice_of(config_of(3, 1, 64), tmp_path)
    report = read_report(tmp_path / "bundle")
    assert report.to_dict()["advice"] == tuple(advice)
    print_report(report)
    assert f"note: {advice[0]}" in capsys.readouterr().err
