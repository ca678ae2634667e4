"""Every kind of tiny model through every stage: eager, exported, compiled, quantised, and the runtime."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import cuda_stubs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from parity import assert_parity, assert_same_choice
from tiny_models import VOCAB, decode_length, tiny_configs, tiny_model, token_ids

import graphport.export.model_export as export_module
from graphport.export.bundle import write_graph
from graphport.export.graph_pass import CompilePlan
from graphport.export.graph_runner import GraphRunner
from graphport.export.model_export import export
from graphport.export.pipeline import compile_graph
from graphport.export.quantize import quantize_blocks
from graphport.export.targets import CPU, CUDA
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.signature import GRAPH_FILE, decoder_signature
from graphport.model_def.transformer import Transformer
from graphport.runtime import SamplingParams, load
from graphport.runtime.graph_checks import SHAPE_OPS

CONFIGS = tiny_configs()
KINDS = sorted(CONFIGS)
EXACT = dataclasses.replace(CPU, accuracy_level=None)  # activations stay float: only the weights differ
# Longer texts in batches of 8 for those that differ in what the cache and the positions must do.
RUNTIME_KINDS = (
    "grouped_query",
    "window",
    "softcap_window",
    "qk_norm",
    "head_dim_20",
    "learned",
    "rotary_partial_0.25",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """One tiny model, its eager logits of `ids`, a runner of each stage's graph, and its fp32 bundle."""

    kind: str
    model: Transformer
    ids: list[int]
    eager: np.ndarray
    exported: GraphRunner
    compiled: GraphRunner
    quantised: GraphRunner
    bundle: Path
    half: ir.Model
    half_path: Path


@pytest.fixture(scope="module", params=KINDS)
def staged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Staged:
    config = CONFIGS[request.param]
    model = tiny_model(config)
    length = decode_length(config)
    ids = token_ids(min(length, 40)).tolist()
    folder = tmp_path_factory.mktemp(request.param)
    plan = CompilePlan(config=config, target=CPU, precision=CPU.precision("fp32"), max_length=length)
    int8 = dataclasses.replace(plan, target=EXACT, precision=CPU.precision("int8"))
    graph = torch_to_onnx(CachedDecoder(model, max_length=length), decoder_signature(config))
    with pytest.MonkeyPatch.context() as patch:  # every graph here comes from one trace
        patch.setattr(export_module, "torch_to_onnx", lambda *_: graph.clone())
        bundle = export(model, folder / "bundle", precision="fp32", context=length, verify=False)
    runners = []
    for stage, how in (("exported", None), ("compiled", plan), ("quantised", int8)):
        (folder / stage).mkdir()
        staged_graph = graph.clone()
        if how is not None:
            compile_graph(staged_graph, how)
        write_graph(staged_graph, folder / stage)
        runners.append(GraphRunner(folder / stage / GRAPH_FILE, config))
    half = graph.clone()
    compile_graph(half, dataclasses.replace(plan, target=CUDA, precision=CUDA.precision("fp16")))
    (folder / "half").mkdir()
    write_graph(half, folder / "half")
    return Staged(
        kind=request.param,
        model=model,
        ids=ids,
        eager=_eager(model, ids),
        exported=runners[0],
        compiled=runners[1],
        quantised=runners[2],
        bundle=bundle.path,
        half=half,
        half_path=folder / "half" / GRAPH_FILE,
    )


def test_the_exported_graph_equals_eager(staged: Staged) -> None:
    found = staged.exported.logits(staged.ids, chunks=(3, 1))
    assert_parity(found, staged.eager, "exported")
    assert_same_choice(found, staged.eager, "exported")


@pytest.mark.parametrize("chunks", [(), (1, 7), (1,) * 12], ids=["one_piece", "chunks", "single_steps"])
def test_the_compiled_graph_equals_eager_however_it_is_fed(staged: Staged, chunks: tuple[int, ...]) -> None:
    found = staged.compiled.logits(staged.ids, chunks=chunks)
    assert_parity(found, staged.eager, "compiled")
    assert_same_choice(found, staged.eager, "compiled")


def test_the_compiled_graph_equals_the_exported_one(staged: Staged) -> None:
    assert_parity(staged.compiled.logits(staged.ids), staged.exported.logits(staged.ids), "compiled")


def test_the_int8_graph_equals_eager_with_the_weights_that_it_holds(staged: Staged) -> None:
    found = staged.quantised.logits(staged.ids, chunks=(5, 1))
    assert_parity(found, _eager(_rounded(staged.model, 8), staged.ids), "quantised, exact activations")
    with pytest.raises(AssertionError):
        assert_parity(found, staged.eager, "quantised, exact activations")


def test_the_runtime_gives_eagers_logits_and_tokens_in_chunks_and_ragged_batches(staged: Staged) -> None:
    prompts = [token_ids(length, seed=length).tolist() for length in (1, 3, 7)]
    with load(staged.bundle, max_batch=3, prefill_chunk=4, threads=1) as lm:
        (logits,) = lm.logits([staged.ids])
        assert_parity(logits, staged.eager, "compiled")
        outputs = lm.generate(prompts, SamplingParams(max_new_tokens=8, temperature=0.0))
        assert lm.generate([prompts[1]], SamplingParams(max_new_tokens=8, temperature=0.0)) == [outputs[1]]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 8
        eager = _eager(staged.model, [*prompt, *output.token_ids[:-1]])[len(prompt) - 1 :]
        assert_same_choice(_one_hot(output.token_ids), eager, "compiled")


def test_all_that_computes_lands_on_cuda_where_a_cuda_graph_may_capture_it(
    staged: Staged, cuda: cuda_stubs.Placer
) -> None:
    placement = cuda.place(staged.half_path, enable_cuda_graph="1")
    assert set(placement.cpu) <= set(SHAPE_OPS)
    attentions = [block.attention for block in staged.model.config.blocks]
    assert placement.cuda.get("GroupQueryAttention", 0) == sum(
        CUDA.attention_limit(attention) is None for attention in attentions
    )
    assert "MultiHeadAttention" not in placement.cuda
    assert "Attention" not in placement.cuda


def test_attention_on_cuda_takes_packed_half_precision_heads_and_their_norms(staged: Staged) -> None:
    kernels = [node for node in staged.half.graph if node.op_type == "GroupQueryAttention"]
    limits = [(block.attention, CUDA.attention_limit(block.attention)) for block in staged.model.config.blocks]
    for kernel, (attention, _) in zip(kernels, [pair for pair in limits if pair[1] is None], strict=True):
        query, key, value = kernel.inputs[:3]
        assert query is not None
        assert query.dtype == ir.DataType.FLOAT16
        rotary, head_dim = attention.rotary, attention.head_dim
        rotates_inside = rotary is None or CUDA.rotary_limit(head_dim, rotary.rotary_dim(head_dim)) is None
        is_by_head = attention.qk_norm_over == "head"
        has_norm = attention.qk_norm is not None and attention.qk_norm.kind == "rms" and is_by_head
        if rotates_inside and (attention.qk_norm is None or has_norm):
            assert key is None, staged.kind
            assert value is None, staged.kind
        assert (len(kernel.inputs) > 14) == (rotates_inside and has_norm), staged.kind


def test_ids_one_position_later_are_rejected(staged: Staged) -> None:
    shifted = staged.compiled.logits([staged.ids[-1], *staged.ids[:-1]])
    if staged.kind == "window_of_one":  # it sees one token at a distance of zero: no shift can show
        assert_parity(shifted[1:], staged.eager[:-1], "compiled")
        return
    with pytest.raises(AssertionError):
        assert_parity(shifted[1:], staged.eager[:-1], "compiled")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("head", ["tied", "separate"])
def test_quantised_graphs_equal_eager_with_the_weights_that_they_hold(tmp_path: Path, bits: int, head: str) -> None:
    config = dataclasses.replace(CONFIGS["grouped_query"], head=head)
    model = tiny_model(config)
    plan = CompilePlan(config=config, target=EXACT, precision=CPU.precision(f"int{bits}"), max_length=40)
    graph = torch_to_onnx(CachedDecoder(model, max_length=40), decoder_signature(config))
    compile_graph(graph, plan)
    write_graph(graph, tmp_path)
    ids = token_ids(40).tolist()
    found = GraphRunner(tmp_path / GRAPH_FILE, config, optimize=True).logits(ids, chunks=(5, 1))
    assert_parity(found, _eager(_rounded(model, bits), ids), "quantised, exact activations")
    with pytest.raises(AssertionError):
        assert_parity(found, _eager(model, ids), "quantised, exact activations")


@pytest.mark.parametrize("kind", RUNTIME_KINDS)
def test_the_runtime_equals_eager_in_ragged_batches(tmp_path: Path, kind: str) -> None:
    config = CONFIGS[kind]
    model = tiny_model(config)
    bundle = export(model, tmp_path / "bundle", precision="fp32")
    assert all(check.passed for check in bundle.certificate)
    prompts = [token_ids(length, seed=length).tolist() for length in (1, 2, 3, 5, 8, 13, 21, 34)]
    params = SamplingParams(max_new_tokens=20, temperature=0.0)
    with load(bundle.path, max_batch=8) as lm:
        together = lm.generate(prompts, params)
        backwards = lm.generate(prompts[::-1], params)[::-1]
        for prompt, one, other in zip(prompts, together, backwards, strict=True):
            whole = [*prompt, *one.token_ids]
            eager = _eager(model, whole[:-1])[len(prompt) - 1 :]
            assert len(one.token_ids) == 20
            assert one.token_ids == other.token_ids
            assert_same_choice(_one_hot(one.token_ids), eager, "compiled")
        assert_parity(lm.logits([prompts[-1]])[0], _eager(model, prompts[-1]), "compiled")


def test_b07_b08_a_prompt_gives_the_same_logits_whatever_its_neighbours(tmp_path: Path) -> None:
    config = CONFIGS["learned"]
    export(tiny_model(config), tmp_path / "bundle", precision="fp32", verify=False)
    prompt = token_ids(5).tolist()
    with load(tmp_path / "bundle", max_batch=4) as lm:
        alone = lm.generate([prompt], SamplingParams(max_new_tokens=16, temperature=0.0, logprobs=3))[0]
        for length in (1, 6, 9, 16, 31):
            neighbours = [token_ids(length, seed=7).tolist(), [0] * length]
            batch = lm.generate(
                [neighbours[0], prompt, neighbours[1]], SamplingParams(max_new_tokens=16, temperature=0.0, logprobs=3)
            )
            assert batch[1].token_ids == alone.token_ids
            assert alone.logprobs is not None
            assert batch[1].logprobs is not None
            found = [sample.logprob for sample in batch[1].logprobs]
            assert_parity(found, [sample.logprob for sample in alone.logprobs], "compiled")


def test_b15_a_flipped_choice_is_a_tie_only_within_the_tolerance(tmp_path: Path) -> None:
    config = CONFIGS["grouped_query"]
    model = tiny_model(config)
    export(model, tmp_path / "bundle", precision="fp32", verify=False)
    prompts = [token_ids(9, seed=seed).tolist() for seed in range(8)]
    with load(tmp_path / "bundle", max_batch=8) as lm:
        alone = [lm.logits([prompt])[0] for prompt in prompts]
        for prompt, one, batched in zip(prompts, alone, lm.logits(prompts), strict=True):
            assert_parity(batched, one, "compiled")
            assert_same_choice(batched, _eager(model, prompt), "compiled")
    wanted = np.array([[1.0, 1.0 + 1e-6, 0.0], [3.0, 0.0, 0.0]])
    assert_same_choice([[1.0 + 1e-6, 1.0, 0.0], [3.0, 0.0, 0.0]], wanted, "compiled")
    with pytest.raises(AssertionError, match="best token differs"):
        assert_same_choice([[1.0, 1.0 + 1e-6, 0.0], [0.0, 3.0, 0.0]], wanted, "compiled")


def test_b28_large_activations_stay_equal_over_many_prompts(tmp_path: Path) -> None:
    config = CONFIGS["qk_norm_unit_offset"]
    model = tiny_model(config)
    with torch.no_grad():
        model.embedding.weight[3:5] *= 300
    export(model, tmp_path / "bundle", precision="fp32", verify=False)
    prompts = [[3, *token_ids(9, seed=seed).tolist(), 4] for seed in range(40)]
    with load(tmp_path / "bundle") as lm:
        for prompt, found in zip(prompts, lm.logits(prompts), strict=True):
            assert_parity(found, _eager(model, prompt), "compiled")


def _eager(model: Transformer, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids]))[0].numpy()


def _rounded(model: Transformer, bits: int) -> Transformer:
    """The model with every matrix rounded as the exporter rounds it; tables keep 8 bits."""
    rounded = copy.deepcopy(model)
    state: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        is_table = name in ("embedding.weight", "head.weight")
        state[name] = tensor
        # positions are looked up by Gather, in float32; norms of single heads stay as they are
        if tensor.ndim == 2 and name != "position.weight" and "norm" not in name:
            blocks = quantize_blocks(tensor.numpy(), 8 if is_table else bits)
            state[name] = torch.from_numpy(blocks.dequantize())
    rounded.load_state_dict(state)
    return rounded


def _one_hot(ids: tuple[int, ...]) -> np.ndarray:
    return np.eye(VOCAB)[list(ids)]
