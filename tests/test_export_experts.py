"""Mixtures of experts: the op against NumPy in double precision, its portable body, the kernels, their bits, limits."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from parity import assert_parity
from tiny_models import block, decoder, tiny_model, token_ids

from graphport.export.bundle import write_graph
from graphport.export.graph_pass import CompilePlan
from graphport.export.graph_runner import GraphRunner
from graphport.export.model_export import export
from graphport.export.pipeline import FusionError, compile_graph, count_fusions
from graphport.export.quantize import quantize_blocks
from graphport.export.targets import CPU
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.config import TransformerConfig
from graphport.model_def.expert_config import ExpertsConfig
from graphport.model_def.expert_ops import mixture_of_experts
from graphport.model_def.position_config import ConfigError
from graphport.model_def.signature import GRAPH_FILE, decoder_signature
from graphport.model_def.transformer import Transformer
from graphport.runtime import SamplingParams, load

LENGTH = 24
PLAIN = ExpertsConfig(num_experts=5, num_chosen=2, width=20)
KINDS = {
    "plain": PLAIN,
    "weights that do not add up": dataclasses.replace(PLAIN, normalized=False, shared_width=28, shared_gate=True),
    "biased and bounded": dataclasses.replace(
        PLAIN, num_chosen=3, bias=True, router_bias=True, alpha=1.702, up_offset=1.0, limit=0.7
    ),
    "all chosen": dataclasses.replace(PLAIN, num_chosen=5, normalized=False, shared_width=28),
}


def model_of(config: TransformerConfig, *, size: float = 2.0) -> Transformer:
    """A tiny model whose experts give `size` times what they read; at 2 they weigh as much as its attention."""
    model = tiny_model(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name and name.endswith("weight"):
                scale = size * parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def graph_of(model: Transformer) -> ir.Model:
    return torch_to_onnx(CachedDecoder(model, max_length=LENGTH), decoder_signature(model.config))


@pytest.fixture(scope="module", params=["plain, weights that do not add up", "biased and bounded, all chosen"])
def mixed(request: pytest.FixtureRequest) -> tuple[Transformer, ir.Model]:
    """A model with a kind of experts in each layer, and its graph."""
    kinds = [KINDS[name] for name in request.param.split(", ")]
    layers = tuple(block(feed_forward=kind) for kind in kinds)
    model = model_of(decoder(*layers))
    return model, graph_of(model)


@pytest.fixture(scope="module")
def wide() -> tuple[Transformer, ir.Model]:
    """A model whose experts have widths of whole blocks, and its graph; another choice of experts changes little."""
    model = model_of(_wide(), size=0.7)
    return model, graph_of(model)


@pytest.fixture
def traced(wide: tuple[Transformer, ir.Model], monkeypatch: pytest.MonkeyPatch) -> Transformer:
    """The wide model; exporting it takes the graph that is there."""
    monkeypatch.setattr("graphport.export.model_export.torch_to_onnx", lambda *_: wide[1].clone())
    return wide[0]


def run(graph: ir.Model, config: TransformerConfig, folder: Path, chunks: tuple[int, ...] = ()) -> NDArray[np.float32]:
    write_graph(graph, folder)
    return GraphRunner(folder / GRAPH_FILE, config).logits(token_ids(LENGTH).tolist(), chunks=chunks)


def plan_of(config: TransformerConfig, precision: str = "fp32", **changes: Any) -> CompilePlan:
    return CompilePlan(config=config, target=CPU, precision=CPU.precision(precision), max_length=LENGTH, **changes)


def _formula(x: Any, scores: Any, matrices: Any, biases: Any, config: ExpertsConfig) -> NDArray[np.float64]:
    """The sum over a token's experts, written out."""
    out = np.zeros(x.shape)
    for token, score in enumerate(scores):
        shares = np.exp(score - score.max()) / np.exp(score - score.max()).sum()
        chosen = np.argsort(-score)[: config.num_chosen]
        for expert in chosen:
            share = shares[expert] / (shares[chosen].sum() if config.normalized else 1.0)
            g, u = (m[expert] @ x[token] + b[expert] for m, b in zip(matrices[:2], biases[:2], strict=True))
            if config.limit is not None:
                g, u = np.minimum(g, config.limit), np.clip(u, -config.limit, config.limit)
            hidden = g / (1 + np.exp(-config.alpha * g)) * (u + config.up_offset)
            out[token] += share * (matrices[2][expert] @ hidden + biases[2][expert])
    return out


@pytest.mark.parametrize("name", KINDS)
def test_the_op_is_the_formula_and_passes_opcheck(name: str) -> None:
    config = KINDS[name]
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 12), (7, 5), (5, 20, 12), (5, 20, 12), (5, 12, 20), (5, 20), (5, 20), (5, 12)]
    tensors = [torch.randn(shape, generator=generator) * len(shape) ** -1.5 for shape in shapes]
    biases = tensors[5:] if config.bias else [None] * 3
    options = (config.num_chosen, config.normalized, config.alpha, config.up_offset, config.limit or 0.0)
    found = mixture_of_experts(*tensors[:5], *biases, *options)
    x, scores, *others = (tensor.double().numpy() for tensor in tensors)
    zeros = [bias * (1 if config.bias else 0) for bias in others[3:]]
    assert_parity(found, _formula(x, scores, others[:3], zeros, config), "layer")
    fewer = dataclasses.replace(config, num_chosen=config.num_chosen - 1)
    with pytest.raises(AssertionError):
        assert_parity(found, _formula(x, scores, others[:3], zeros, fewer), "layer")
    torch.library.opcheck(mixture_of_experts, (*tensors[:5], *biases, *options))


def test_experts_equal_eager_exported_and_compiled_in_any_chunks(
    mixed: tuple[Transformer, ir.Model], tmp_path: Path
) -> None:
    model, graph = mixed
    config = model.config
    with torch.no_grad():
        expected = model(token_ids(1, LENGTH))[0].numpy()
    (tmp_path / "exported").mkdir()
    (tmp_path / "compiled").mkdir()
    assert_parity(run(graph.clone(), config, tmp_path / "exported", (3, 1)), expected, "exported")
    compiled = graph.clone()
    reports = compile_graph(compiled, plan_of(config))
    counts = count_fusions(reports)
    shared = sum(one.dense is not None for one in config.blocks)
    assert (counts["experts"], counts["packed_gate_up"], counts["silu"]) == (2, shared, shared)
    assert not any(node.domain == "graphport" for node in compiled.graph)
    for chunks in ((), (3, 1)):  # the MoE kernel reads its input where nothing else does: it may not be overwritten
        assert_parity(run(compiled.clone(), config, tmp_path / "compiled", chunks), expected, "compiled")


def _wide() -> TransformerConfig:
    """Widths of whole blocks."""
    experts = ExpertsConfig(num_experts=4, num_chosen=2, width=96, normalized=False, bias=True)
    return decoder(block(feed_forward=experts), hidden_size=64)


def _rounded(model: Transformer, bits: int) -> Transformer:
    """The model with the matrices of its experts as the graph holds them."""
    rounded = Transformer(model.config).eval()
    rounded.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if ".experts." in name and name.endswith("weight"):
                for index, matrix in enumerate(parameter.numpy()):
                    parameter[index] = torch.from_numpy(quantize_blocks(matrix.copy(), bits).dequantize())
    return rounded


def test_four_bit_experts_are_exactly_the_rounded_ones_where_activations_are_not_rounded(
    wide: tuple[Transformer, ir.Model], tmp_path: Path
) -> None:
    model, graph = wide
    config = model.config
    plan = plan_of(config, "int4", accuracy_level=0)
    # only the experts: every other matrix keeps its floats
    precision = dataclasses.replace(plan.precision, table_bits=None)
    compiled = graph.clone()
    reports = compile_graph(compiled, dataclasses.replace(plan, precision=precision))
    assert count_fusions(reports)["experts"] == 2
    nodes = [node for node in compiled.graph if node.op_type == "QMoE"]
    assert [node.attributes["weights_prepacked"].as_int() for node in nodes] == [0, 0]
    found = run(compiled, config, tmp_path)
    rounded = _rounded(model, 4)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if ".experts." not in name and "router" not in name and parameter.ndim == 2 and name.startswith("blocks"):
                parameter.copy_(torch.from_numpy(quantize_blocks(parameter.numpy().copy(), 4).dequantize()))
        expected = rounded(token_ids(1, LENGTH))[0].numpy()
        plain = model(token_ids(1, LENGTH))[0].numpy()
    assert_parity(found, expected, "quantised, exact activations")
    with pytest.raises(AssertionError):
        assert_parity(found, plain, "quantised, exact activations")


def test_experts_of_odd_widths_stay_floats_and_the_report_says_why(
    mixed: tuple[Transformer, ir.Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph = mixed
    config, compiled = model.config, graph.clone()
    reports = compile_graph(compiled, plan_of(config, "int8"))
    missed = [miss for report in reports if report.rule == "experts" for miss in report.missed]
    assert [miss.site for miss in missed] == ["layer 0 feed_forward.experts", "layer 1 feed_forward.experts"]
    assert missed[0].found == "the hidden size 40 is no multiple of 32, so their weights stay floats"
    assert {node.op_type for node in compiled.graph} >= {"MoE", "MatMulNBits"}
    monkeypatch.setattr("graphport.export.model_export.torch_to_onnx", lambda *_: graph.clone())
    with pytest.raises(FusionError, match=r"rule experts is required everywhere; it fused 2 sites.* no multiple of 32"):
        export(
            model,
            tmp_path / "bundle",
            precision="int8",
            require_fused={"experts": "all"},
            context=LENGTH,
            verify=False,
        )


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_bundle_of_quantised_experts_generates_and_in_8_bits_passes_its_certificate(
    precision: str, traced: Transformer, tmp_path: Path
) -> None:
    bundle = export(
        traced,
        tmp_path / "bundle",
        precision=precision,
        context=LENGTH,
        require_fused={"experts": "all"},
        verify=precision == "int8",  # 4 bits are too few for matrices as small and as random as these
    )
    assert bundle.fusions["experts"] == 2
    assert bool(bundle.certificate) == (precision == "int8")
    assert all(check.passed for check in bundle.certificate)
    with load(bundle.path, threads=1) as lm:
        prompts = [token_ids(length).tolist() for length in (3, 5)]
        params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
        together = lm.generate(prompts, params)
        assert [lm.generate([prompt], params)[0] for prompt in prompts] == together


def test_numbers_that_no_mixture_can_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="a token runs 6 experts, of which there are 5"):
        dataclasses.replace(PLAIN, num_chosen=6)
    with pytest.raises(ConfigError, match="shared_gate needs a shared feed-forward"):
        dataclasses.replace(PLAIN, shared_gate=True)
    config = decoder(block(feed_forward=KINDS["biased and bounded"]))
    assert TransformerConfig.from_dict(config.to_dict()) == config
