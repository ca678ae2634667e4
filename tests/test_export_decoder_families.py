"""Every decoder family through every stage: exported, compiled, decoded with a cache, batched, placed on CUDA.

The reference is transformers' own model on whole texts; every stage of a family comes from one trace.
"""

import dataclasses
from pathlib import Path
from typing import Any

import cuda_stubs
import numpy as np
import pytest
import torch
from parity import assert_parity, assert_same_choice
from tiny_checkpoints import token_ids
from tiny_decoder_values import VOCAB, Decoder
from tiny_decoders import DECODERS, decoder_logits, make_decoder
from tiny_models import decode_length

import graphport.export.model_export as export_module
from graphport.export.bundle import write_graph
from graphport.export.graph_pass import CompilePlan
from graphport.export.graph_runner import GraphRunner
from graphport.export.model_export import export
from graphport.export.pipeline import compile_graph, count_fusions
from graphport.export.targets import CPU, CUDA
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.checkpoint import load_checkpoint
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import ConfigError
from graphport.model_def.signature import GRAPH_FILE, decoder_signature
from graphport.model_def.transformer import Transformer
from graphport.runtime import SamplingParams, load
from graphport.runtime.graph_checks import SHAPE_OPS

STAGED = tuple(DECODERS)
LENGTH = 40  # beyond the windows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A family's model of transformers, what was read of it, its graphs and its bundle."""

    decoder: Decoder
    reference: Any
    config: TransformerConfig
    ids: list[int]
    exported: GraphRunner
    compiled: GraphRunner
    fusions: dict[str, int]
    missed: tuple[str, ...]
    bundle: Path
    half: Path

    def expected(self, ids: list[int]) -> np.ndarray:
        """transformers' logits of the whole text."""
        logits: np.ndarray = decoder_logits(self.reference, torch.tensor([ids]))[0].numpy()
        return logits


@pytest.fixture(scope="module", params=STAGED)
def staged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Staged:
    reference = make_decoder(request.param)
    folder = tmp_path_factory.mktemp("family")
    reference.save_pretrained(folder / "source")
    checkpoint = load_checkpoint(folder / "source")
    config = checkpoint.config
    model = Transformer(config).eval()
    model.load_state_dict(checkpoint.weights, strict=True)
    length = decode_length(config)
    graph = torch_to_onnx(CachedDecoder(model, max_length=length), decoder_signature(config))
    with pytest.MonkeyPatch.context() as patch:  # every graph here comes from one trace
        patch.setattr(export_module, "torch_to_onnx", lambda *_: graph.clone())
        bundle = export(model, folder / "bundle", precision="fp32", context=length, verify=False)
    plan = CompilePlan(config=config, target=CPU, precision=CPU.precision("fp32"), max_length=length)
    half = dataclasses.replace(plan, target=CUDA, precision=CUDA.precision("fp16"))
    fusions: dict[str, int] = {}
    missed: tuple[str, ...] = ()
    for stage, how in (("exported", None), ("compiled", plan), ("half", half)):
        (folder / stage).mkdir()
        staged_graph = graph.clone()
        if how is not None:
            reports = compile_graph(staged_graph, how)
            fusions = fusions or count_fusions(reports)
            missed += tuple(miss.site for report in reports for miss in report.missed)
        write_graph(staged_graph, folder / stage)
    return Staged(
        decoder=DECODERS[request.param],
        reference=reference,
        config=config,
        ids=token_ids(min(length, LENGTH))[0].tolist(),
        exported=GraphRunner(folder / "exported" / GRAPH_FILE, config),
        compiled=GraphRunner(folder / "compiled" / GRAPH_FILE, config),
        fusions=fusions,
        missed=missed,
        bundle=bundle.path,
        half=folder / "half" / GRAPH_FILE,
    )


def test_the_exported_graph_equals_transformers(staged: Staged) -> None:
    assert_parity(staged.exported.logits(staged.ids, chunks=(3, 1)), staged.expected(staged.ids), "exported")


@pytest.mark.parametrize("chunks", [(), (1, 7), (1,) * 12], ids=["one_piece", "chunks", "single_steps"])
def test_the_compiled_graph_equals_transformers_however_it_is_fed(staged: Staged, chunks: tuple[int, ...]) -> None:
    found, expected = staged.compiled.logits(staged.ids, chunks=chunks), staged.expected(staged.ids)
    assert_parity(found, expected, "compiled")
    assert_same_choice(found, expected, "compiled")
    with pytest.raises(AssertionError):
        assert_parity(found[1:], expected[:-1], "compiled")


def test_what_the_config_calls_for_is_fused(staged: Staged) -> None:
    decoder, layers = staged.decoder, staged.config.num_layers
    assert staged.fusions["residual_norm"] == decoder.residual_norm
    assert staged.fusions["attention"] == layers
    assert staged.fusions["packed_qkv"] == decoder.packed_qkv
    assert staged.fusions["packed_gate_up"] == decoder.gated
    assert staged.fusions["experts"] == decoder.experts
    assert all(site.startswith(("layer ", "final_norm", "embedding_norm")) for site in staged.missed), staged.missed


def test_ragged_batches_decode_as_transformers_recomputes(staged: Staged) -> None:
    prompts = [token_ids(length, seed=length)[0].tolist() for length in (1, 3, 7)]
    params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    with load(staged.bundle, max_batch=3, prefill_chunk=4, threads=1) as lm:
        outputs = lm.generate(prompts, params)
        assert lm.generate([prompts[1]], params) == [outputs[1]]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 8
        expected = staged.expected([*prompt, *output.token_ids[:-1]])[len(prompt) - 1 :]
        assert_same_choice(np.eye(VOCAB)[list(output.token_ids)], expected, "compiled")


def test_all_that_computes_lands_on_cuda(staged: Staged, cuda: cuda_stubs.Placer) -> None:
    captured = staged.config.relative_bias is None  # a bias is as wide as the text, which a captured step fixes
    placement = cuda.place(staged.half, **({"enable_cuda_graph": "1"} if captured else {}))
    assert set(placement.cpu) <= set(SHAPE_OPS)
    assert placement.cuda["GroupQueryAttention"] == staged.config.num_layers


def test_b40_a_cache_that_would_cross_the_original_length_is_refused(staged: Staged, tmp_path: Path) -> None:
    switch = staged.decoder.switch
    if switch is None:
        assert decode_length(staged.config) == staged.config.max_positions
        return
    with pytest.raises(ConfigError, match=rf"LongRopeScaling changes its frequencies beyond {switch} positions"):
        export(Transformer(staged.config), tmp_path / "bundle", context=switch + 1)
