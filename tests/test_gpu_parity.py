"""Bundles on the device they were compiled for, against eager PyTorch in float32 and in their own precision.

`make test-gpu` runs them on a CUDA device. The same code runs on the CPU in every test run, so it is known to work.
"""

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import TOLERANCES, difference
from tiny_models import tiny_configs, tiny_encoder_configs, tiny_model, token_ids

from graphport.export.certify import parity_ids
from graphport.export.model_export import export
from graphport.export.parity import TOLERANCES as PARITY
from graphport.export.parity import compare
from graphport.export.source import SourceModel, open_source
from graphport.model_def.transformer import Transformer
from graphport.runtime import SamplingParams, load, load_encoder

CONFIGS = tiny_configs()
KINDS = ("grouped_query", "window", "softcap_window", "qk_norm", "head_dim_20", "learned", "rotary_partial_0.25")
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True, logprobs=1)
INTEGER_KL = {"int8": PARITY["int8", "kl"], "int4": PARITY["int4", "kl"]}
LENGTHS = (1, 3, 7, 16, 5, 11, 2, 13)  # of the prompts of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A device, what is exported for it, and the dtype in which eager runs there."""

    device: str
    precision: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.device}-{self.precision}"


CPU = Place(device="cpu", precision="fp32", dtype=torch.float32)
CUDA_FP16 = Place(device="cuda", precision="fp16", dtype=torch.float16)
CUDA_BF16 = Place(device="cuda", precision="bf16", dtype=torch.bfloat16)

on_gpu = [pytest.param(place, marks=pytest.mark.gpu, id=str(place)) for place in (CUDA_FP16, CUDA_BF16)]
everywhere = [pytest.param(CPU, id=str(CPU)), *on_gpu]

Bundles = Callable[[str, Place], Path]


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device: run `make test-gpu` where there is one")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """The bundle of a tiny model, by kind and place."""

    @functools.cache
    def exported(kind: str, place: Place) -> Path:
        out = tmp_path_factory.mktemp(kind) / str(place)
        export(tiny_model(CONFIGS[kind]), out, target=place.device, precision=place.precision, verify=False)
        return out

    return exported


@pytest.mark.parametrize("place", everywhere)
@pytest.mark.parametrize("kind", ["encoder_bert", "encoder_relative_bias", "encoder_windows"])
def test_an_encoder_on_its_device_equals_eager_in_ragged_batches(kind: str, place: Place, tmp_path: Path) -> None:
    model = tiny_model(tiny_encoder_configs()[kind])
    export(model, tmp_path / "out", target=place.device, precision=place.precision, verify=False)
    texts = [token_ids(length, seed=length).tolist() for length in LENGTHS]
    with load_encoder(tmp_path / "out", device=place.device) as encoder:
        found = encoder.hidden_states(texts)
    tolerance = TOLERANCES["on its device", str(place.dtype).removeprefix("torch.")]
    for ids, states in zip(texts, found, strict=True):
        wanted = eager(model, ids)
        assert difference(states, wanted).max_abs <= tolerance * np.abs(wanted).max()


def eager(model: Transformer, ids: list[int], place: Place = CPU) -> np.ndarray:
    """Logits [S, V] float32 of the module in the dtype and on the device of `place`."""
    moved = model.to(place.device, place.dtype)
    try:
        with torch.inference_mode():
            logits = moved(torch.tensor([ids], device=place.device))[0].float().cpu().numpy()
    finally:
        moved.to("cpu", torch.float32)
    return np.asarray(logits, np.float32)


def allowed_error(place: Place, wanted: np.ndarray, in_place: np.ndarray) -> float:
    """Twice what eager itself loses in this precision, and at least the floor of the table."""
    floor = TOLERANCES["on its device", str(place.dtype).removeprefix("torch.")]
    return max(floor, 2 * difference(in_place, wanted).max_abs)


@pytest.mark.parametrize("place", everywhere)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_no_further_from_float32_than_eager_in_the_same_precision(
    kind: str, place: Place, bundle: Bundles
) -> None:
    ids = token_ids(33).tolist()
    wanted, in_place = eager(tiny_model(CONFIGS[kind]), ids), eager(tiny_model(CONFIGS[kind]), ids, place)
    with load(bundle(kind, place), device=place.device, max_batch=1, prefill_chunk=7, threads=1) as lm:
        (found,) = lm.logits([ids])
        (shifted,) = lm.logits([[ids[-1], *ids[:-1]]])
    allowed = allowed_error(place, wanted, in_place)
    assert difference(found, wanted).max_abs <= allowed
    assert difference(shifted[1:], wanted[:-1]).max_abs > 3 * allowed


@pytest.mark.parametrize("place", everywhere)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("kind", ["grouped_query", "window"])
def test_b15_ragged_batches_choose_what_eager_chooses_unless_it_is_a_tie(
    kind: str, batch: int, place: Place, bundle: Bundles
) -> None:
    prompts = [token_ids(length, seed=length).tolist() for length in LENGTHS[:batch]]
    with load(bundle(kind, place), device=place.device, max_batch=8, threads=1) as lm:
        outputs = lm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == GREEDY.max_new_tokens
        whole = [*prompt, *output.token_ids[:-1]]
        wanted = eager(tiny_model(CONFIGS[kind]), whole)
        in_place = eager(tiny_model(CONFIGS[kind]), whole, place)
        allowed = allowed_error(place, wanted, in_place)
        rows = wanted[len(prompt) - 1 :]
        chosen = np.take_along_axis(rows, np.array(output.token_ids)[:, None], axis=1)[:, 0]
        assert (rows.max(axis=1) - chosen <= 2 * allowed).all(), (kind, batch, len(prompt))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_captured_decode_steps_equal_those_that_run_one_by_one(kind: str, bundle: Bundles) -> None:
    prompts = [token_ids(length, seed=length).tolist() for length in LENGTHS]
    results: list[Any] = []
    for is_captured in (True, False):
        with load(bundle(kind, CUDA_FP16), device="cuda", max_batch=8, cuda_graphs=is_captured) as lm:
            assert lm.cuda_graphs == is_captured
            results.append((lm.generate(prompts, GREEDY), lm.generate(prompts[:3], GREEDY)))
    for captured, plain in zip(*results, strict=True):
        for ours, theirs in zip(captured, plain, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert_logprobs(ours, theirs)


def assert_logprobs(found: Any, wanted: Any) -> None:
    ours, theirs = ([sample.logprob for sample in output.logprobs] for output in (found, wanted))
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCES["on its device", "float16"])


@pytest.mark.gpu
def test_b97_memory_of_the_device_is_flat_after_the_first_requests(bundle: Bundles) -> None:
    prompts = [token_ids(length, seed=length).tolist() for length in LENGTHS]
    with load(bundle("grouped_query", CUDA_FP16), device="cuda", max_batch=4) as lm:
        used = []
        for index in range(300):
            lm.generate(prompts[index % 8 :], SamplingParams(max_new_tokens=4, temperature=0.0))
            if index in (50, 299):
                gc.collect()
                free, total = torch.cuda.mem_get_info()
                used.append(total - free)
    assert used[1] - used[0] < 1 << 20


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> SourceModel:
    return open_source(smollm2_gguf, seed=0)


@pytest.mark.gpu
@pytest.mark.real
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "int4"])
def test_smollm2_on_the_device_is_as_close_to_float32_as_its_precision_allows(
    precision: str, smollm2: SourceModel, smollm2_gguf: Path, tmp_path: Path
) -> None:
    assert_real_model(smollm2, smollm2_gguf, precision, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16", "int4"])
def test_gemma3_on_the_device_is_as_close_to_float32_as_its_precision_allows(
    precision: str, gemma3_gguf: Path, tmp_path: Path
) -> None:
    assert_real_model(open_source(gemma3_gguf, seed=0), gemma3_gguf, precision, tmp_path)


def assert_real_model(opened: SourceModel, path: Path, precision: str, folder: Path) -> None:
    """Mean KL to eager float32 on the parity text: twice eager's own in that dtype, or the table's for integers."""
    ids = parity_ids(opened.model.config, opened.tokenizer_json, max_length=1024, seed=0)
    wanted = eager(opened.model, ids)
    export(path, folder / "bundle", target="cuda", precision=precision, context=1024, verify=False)
    with load(folder / "bundle", device="cuda", max_batch=1, prefill_chunk=256) as lm:
        (found,) = lm.logits([ids])
    measured = compare(wanted, found)
    if precision in INTEGER_KL:
        assert measured.kl <= INTEGER_KL[precision]
        return
    place = CUDA_FP16 if precision == "fp16" else CUDA_BF16
    in_place = compare(wanted, eager(opened.model, ids, place))
    assert measured.kl <= 2 * in_place.kl
