"""SmolLM2-135M-Instruct, the whole way: transformers, our eager module, the fp32 and int8 bundles, the runtime."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from graphport.runtime import LanguageModel, SamplingParams, load

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("smollm2")]

NUM_TOKENS = 512
MAX_NODES = 320

# Limits that the bundles are shipped under; beside each what was measured.
FP32_MAX_ABS = 5e-4  # 8.3e-5
FP32_KL = 1e-9  # 1.4e-11
INT8_KL = 0.006  # 0.0020
INT4_KL = 0.09  # 0.071; rounded to nearest 0.13
GGUF_KL = 0.005  # 0.0029: 8-bit activations
GGUF_EXACT_KL = 1e-6  # 1.9e-11: exact activations
EAGER_MAX_ABS = 5e-4  # our module against transformers: 6.3e-5
PATHS_MAX_ABS = 5e-4  # chunks, steps and batches against one piece: 6.1e-5

GREEDY = SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True)

PROMPTS = (
    "The capital of France is",
    "1, 1, 2, 3, 5, 8,",
    "Once",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to",
    "Water boils at",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "In 1969, two astronauts",
)


@pytest.fixture(scope="module")
def source(smollm2_gguf: Path) -> Any:
    from graphport.export.source import open_source

    return open_source(smollm2_gguf, seed=0)


@pytest.fixture(scope="module")
def text_ids(source: Any) -> list[int]:
    from graphport.export.certify import parity_ids

    ids = parity_ids(source.model.config, source.tokenizer_json, max_length=8192, seed=0)
    assert len(ids) == NUM_TOKENS
    return ids


@pytest.fixture(scope="module")
def eager(source: Any, text_ids: list[int]) -> NDArray[np.float32]:
    from graphport.export.certify import eager_logits

    return eager_logits(source.model, text_ids)


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path, text_ids: list[int]) -> Any:
    """Logits of the text and 64 greedy tokens from transformers' own model of the same file."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    prompt = torch.tensor([text_ids[:40]])
    with torch.inference_mode():
        logits = model(torch.tensor([text_ids])).logits[0].numpy()
        greedy = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=64,
            min_new_tokens=64,
            do_sample=False,
            pad_token_id=2,
        )
    return SimpleNamespace(logits=logits, greedy=greedy[0, 40:].tolist())


@pytest.fixture(scope="module")
def bundles(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from graphport.export import export

    folder = tmp_path_factory.mktemp("smollm2")
    paths = {name: folder / name for name in ("fp32", "int8", "int4", "gguf")}
    export(smollm2_gguf, paths["fp32"], precision="fp32", verify=False, layouts=("genai", "optimum"))
    export(smollm2_gguf, paths["int8"], precision="int8", verify=True)
    export(smollm2_gguf, paths["int4"], precision="int4", verify=False)
    export(smollm2_gguf, paths["gguf"], verify=True, require_exact=True)
    return paths


@pytest.fixture(scope="module")
def fp32(bundles: dict[str, Path]) -> Iterator[LanguageModel]:
    with load(bundles["fp32"]) as lm:
        yield lm


@pytest.fixture(scope="module")
def int8(bundles: dict[str, Path]) -> Iterator[LanguageModel]:
    with load(bundles["int8"]) as lm:
        yield lm


def test_our_module_equals_transformers(eager: NDArray[np.float32], reference: Any) -> None:
    difference = np.abs(eager - reference.logits)
    assert difference.max() <= EAGER_MAX_ABS
    assert (eager.argmax(-1) == reference.logits.argmax(-1)).all()


def test_the_fp32_bundle_equals_eager(fp32: LanguageModel, eager: NDArray[np.float32], text_ids: list[int]) -> None:
    from graphport.export.parity import compare

    found = compare(eager, fp32.logits([text_ids])[0])
    assert found.max_abs <= FP32_MAX_ABS, found
    assert found.kl <= FP32_KL, found
    assert found.top1 == 1.0, found


def test_the_int8_bundle_stays_close_to_eager(
    int8: LanguageModel, eager: NDArray[np.float32], text_ids: list[int]
) -> None:
    from graphport.export.parity import compare

    found = compare(eager, int8.logits([text_ids])[0])
    assert found.kl <= INT8_KL, found


def test_the_int4_bundle_is_half_as_far_as_rounding_to_nearest(
    bundles: dict[str, Path], eager: NDArray[np.float32], text_ids: list[int]
) -> None:
    from graphport.export.parity import compare

    with load(bundles["int4"]) as lm:
        found = compare(eager, lm.logits([text_ids])[0])
    assert 0 < found.kl <= INT4_KL, found
    sizes = {name: (bundles[name] / "model.onnx.data").stat().st_size for name in ("int8", "int4")}
    assert sizes["int4"] < 0.68 * sizes["int8"]


def test_the_gguf_bundle_keeps_every_value_of_the_file(
    bundles: dict[str, Path], eager: NDArray[np.float32], text_ids: list[int]
) -> None:
    from graphport.export.parity import compare

    account = json.loads((bundles["gguf"] / "fusions.json").read_text(encoding="utf-8"))
    assert {(row["source"], row["form"], row["max_error"]) for row in account["matrices"]} == {
        ("Q4_1", "4-bit/32 + minima", 0.0),
        ("Q8_0", "8-bit/32", 0.0),
    }
    checks = json.loads((bundles["gguf"] / "certificate.json").read_text(encoding="utf-8"))["checks"]
    (exact,) = (check["measured"] for check in checks if check["name"].startswith("exact blocks"))
    assert 0 <= exact <= GGUF_EXACT_KL
    with load(bundles["gguf"]) as lm:
        found = compare(eager, lm.logits([text_ids])[0])
    assert 0 < found.kl <= GGUF_KL, found
    sizes = {name: (bundles[name] / "model.onnx.data").stat().st_size for name in ("int8", "gguf")}
    assert sizes["gguf"] < 0.75 * sizes["int8"]


def test_a_shifted_text_and_zeros_are_rejected_by_the_same_limits(
    eager: NDArray[np.float32], fp32: LanguageModel, text_ids: list[int]
) -> None:
    from graphport.export.parity import compare

    shifted = fp32.logits([[text_ids[0], *text_ids[:-1]]])[0]  # every token one position later
    assert compare(eager[1:], shifted[:-1]).kl > INT8_KL
    assert compare(eager, np.zeros_like(eager)).kl > INT8_KL


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_equals_one_piece(
    bundles: dict[str, Path], eager: NDArray[np.float32], text_ids: list[int], chunk: int
) -> None:
    length = 160 if chunk == 1 else 320
    with load(bundles["fp32"], prefill_chunk=chunk, max_batch=1) as lm:
        found = lm.logits([text_ids[:length]])[0]
    assert np.abs(found - eager[:length]).max() <= PATHS_MAX_ABS


def test_64_greedy_tokens_equal_transformers(fp32: LanguageModel, reference: Any, text_ids: list[int]) -> None:
    output = fp32.generate([text_ids[:40]], GREEDY)[0]
    assert list(output.token_ids) == reference.greedy


def test_a_ragged_batch_of_8_equals_each_prompt_alone(fp32: LanguageModel) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    together = fp32.generate(list(PROMPTS), params)
    alone = [fp32.generate([prompt], params)[0] for prompt in PROMPTS]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [output.text for output in together] == [output.text for output in alone]


def test_the_int8_bundle_knows_the_capital_of_france(int8: LanguageModel) -> None:
    events = int8.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(max_new_tokens=48, temperature=0.0),
    )
    assert "Paris" in "".join(event.text for event in events)


def test_eval_of_the_int8_bundle_against_its_gguf(
    bundles: dict[str, Path],
    smollm2_gguf: Path,
    eager: NDArray[np.float32],
    text_ids: list[int],
    int8: LanguageModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from graphport.cli import main
    from graphport.export.parity import compare
    from graphport.model_def.parity_text import PARITY_TEXT

    text = PARITY_TEXT[: PARITY_TEXT.index("\n\n", 1000)]
    assert int8.tokenizer is not None
    length = len(int8.tokenizer.encode(text))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    command = ["eval", str(bundles["int8"]), str(tmp_path / "text.txt"), "--against", str(smollm2_gguf), "--json"]
    assert main(command) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["scored"] == length - 1 > 200
    rows = eager[: length - 1].astype(np.float64)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    nll = -rows[np.arange(length - 1), text_ids[1:length]].mean()
    fidelity = data["fidelity"]
    assert abs(fidelity["negative_log_likelihood"] - nll) <= PATHS_MAX_ABS
    expected = compare(eager[: length - 1], int8.logits([text_ids[: length - 1]])[0])
    assert abs(fidelity["kl_mean"] - expected.kl) <= PATHS_MAX_ABS
    assert 0 < fidelity["kl_mean"] <= INT8_KL
    assert fidelity["top1_agreement"] == pytest.approx(expected.top1, abs=2 / length)  # near-ties
    assert 0 < fidelity["widest_flip"] <= 2 * fidelity["max_abs_logit_difference"]


def test_onnxruntime_genai_continues_as_the_runtime_does(
    bundles: dict[str, Path], fp32: LanguageModel, genai_python: Path
) -> None:
    assert fp32.tokenizer is not None
    prompts = [fp32.tokenizer.encode(prompt) for prompt in PROMPTS]
    command = [genai_python, Path(__file__).with_name("run_genai.py"), bundles["fp32"], json.dumps(prompts), "32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outputs = fp32.generate(prompts, SamplingParams(max_new_tokens=32, temperature=0.0))
    ours = [list(o.token_ids[:-1] if o.finish_reason == "stop" else o.token_ids) for o in outputs]  # theirs has no end
    assert json.loads(done.stdout) == ours


def test_layouts_of_smollm2_compute_its_logits(bundles: dict[str, Path]) -> None:
    from graphport.export.layout_parity import layout_check
    from graphport.export.layouts import LAYOUTS
    from graphport.model_def.signature import read_manifest

    manifest = read_manifest(bundles["fp32"])
    for layout in LAYOUTS:
        assert layout_check(bundles["fp32"], layout, manifest.config, max_length=manifest.max_length, seed=0).passed


def test_every_layer_is_fused_in_at_most_320_nodes(bundles: dict[str, Path]) -> None:
    account = json.loads((bundles["int8"] / "fusions.json").read_text(encoding="utf-8"))
    assert account["nodes"] <= MAX_NODES
    counts = account["counts"]
    assert counts["residual_norm"] == 60
    for rule in ("packed_qkv", "packed_gate_up", "silu", "attention"):
        assert counts[rule] == 30, rule


def test_weights_are_stored_once(bundles: dict[str, Path], source: Any) -> None:
    num_parameters = sum(parameter.numel() for parameter in source.model.parameters())
    assert (bundles["fp32"] / "model.onnx.data").stat().st_size <= 1.05 * 4 * num_parameters
    assert (bundles["int8"] / "model.onnx.data").stat().st_size <= 1.05 * num_parameters * (1 + 4 / 32)
