"""A bundle for CUDA on a machine without: it runs on the CPU and computes what eager does, or says why it cannot."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from parity import assert_parity, assert_same_choice
from tiny_models import VOCAB, decode_length, tiny_configs, tiny_model, token_ids

import graphport.export.model_export as export_module
from graphport.export import round_matrices
from graphport.export.error_feedback import round_with_feedback
from graphport.export.model_export import export
from graphport.export.quantize import BlockQuantized
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.signature import decoder_signature
from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.device import DeviceError

CONFIGS = tiny_configs()
# What the cache, the positions and the kernels of attention must do differently.
KINDS = ("grouped_query", "head_dim_20", "learned", "softcap_window", "rotary_partial_0.25")
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)

Bundles = Callable[[str, str, str], Path]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    """The folder of a bundle by kind, target and precision; all of a kind come from one trace.

    4-bit blocks are symmetric, as those for CUDA: with zero points the CPU's are other numbers.
    """

    @functools.cache
    def traced(kind: str) -> ir.Model:
        decoder = CachedDecoder(tiny_model(CONFIGS[kind]), max_length=decode_length(CONFIGS[kind]))
        return torch_to_onnx(decoder, decoder_signature(CONFIGS[kind]))

    @functools.cache
    def exported(kind: str, target: str, precision: str) -> Path:
        out = tmp_path_factory.mktemp(kind) / f"{target}_{precision}"
        length = decode_length(CONFIGS[kind])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(export_module, "torch_to_onnx", lambda *_: traced(kind).clone())
            patch.setattr(round_matrices, "round_with_feedback", functools.partial(_symmetric, round_with_feedback))
            export(tiny_model(CONFIGS[kind]), out, target=target, precision=precision, context=length, verify=False)
        return out

    return exported


def _symmetric(round_: Callable[..., BlockQuantized], *matrices: Any, **options: Any) -> BlockQuantized:
    return round_(*matrices, **options | {"asymmetric": False})


def opened(folder: Path) -> LanguageModel:
    return load(folder, device="cpu", max_batch=3, prefill_chunk=4, threads=1)


def eager(kind: str, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return tiny_model(CONFIGS[kind])(torch.tensor([ids]))[0].numpy()


def text(kind: str) -> list[int]:
    return token_ids(min(decode_length(CONFIGS[kind]), 40)).tolist()


def one_hot(ids: tuple[int, ...]) -> np.ndarray:
    return np.eye(VOCAB)[list(ids)]


@pytest.mark.parametrize("kind", KINDS)
def test_float16_bundles_give_eagers_logits_and_tokens_in_chunks_and_ragged_batches(kind: str, bundle: Bundles) -> None:
    prompts = [token_ids(length, seed=length).tolist() for length in (1, 3, 7)]
    with opened(bundle(kind, "cuda", "fp16")) as lm:
        (logits,) = lm.logits([text(kind)])
        outputs = lm.generate(prompts, GREEDY)
    assert_parity(logits, eager(kind, text(kind)), "compiled", dtype="float16")
    with pytest.raises(AssertionError):
        assert_parity(logits[1:], eager(kind, text(kind))[:-1], "compiled", dtype="float16")
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 8
        whole = eager(kind, [*prompt, *output.token_ids[:-1]])[len(prompt) - 1 :]
        assert_same_choice(one_hot(output.token_ids), whole, "compiled", dtype="float16")


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["grouped_query", "tied_head"])
def test_quantised_bundles_compute_what_those_for_the_cpu_compute(kind: str, precision: str, bundle: Bundles) -> None:
    ids = text(kind)
    with opened(bundle(kind, "cuda", precision)) as ours, opened(bundle(kind, "cpu", precision)) as theirs:
        (found,), (wanted,) = ours.logits([ids]), theirs.logits([ids])
        stepwise = ours.generate([ids[:9]], GREEDY)[0].token_ids
        (whole,) = ours.logits([[*ids[:9], *stepwise[:-1]]])
    assert_parity(found, wanted, f"{precision} for both targets", dtype="float16")
    with pytest.raises(AssertionError):
        assert_parity(found[1:], wanted[:-1], f"{precision} for both targets", dtype="float16")
    assert_same_choice(one_hot(stepwise), whole[8:], "compiled", dtype="float16")


@pytest.mark.parametrize(
    ("kind", "precision", "reason"),
    [
        ("grouped_query", "bf16", "it computes in bfloat16, for which the CPU has no kernels"),
        ("qk_norm", "fp16", "its GroupQueryAttention norms query and key heads itself, which only CUDA's does"),
        ("qk_norm", "int8", "its GroupQueryAttention norms query and key heads itself, which only CUDA's does"),
    ],
)
def test_bundles_that_the_cpu_cannot_run_are_refused_with_the_reason_and_what_to_do(
    kind: str, precision: str, reason: str, bundle: Bundles
) -> None:
    folder = bundle(kind, "cuda", precision)
    with pytest.raises(DeviceError) as raised:
        opened(folder)
    assert str(raised.value) == (
        f"{folder} cannot run on the CPU: {reason}; export it for the CPU with `graphport export SOURCE OUT --target "
        "cpu`, or run it on a GPU (use device='cuda')"
    )


def test_the_same_model_exported_for_the_cpu_runs(bundle: Bundles) -> None:
    with opened(bundle("qk_norm", "cpu", "fp32")) as lm:
        assert_parity(lm.logits([text("qk_norm")])[0], eager("qk_norm", text("qk_norm")), "compiled")
