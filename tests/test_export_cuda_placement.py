"""Bundles for CUDA, checked without a GPU: every node has a CUDA kernel, in the precision asked for.

Every kind of tiny model is placed in test_parity_stages.py, which has traced it already.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import cuda_stubs
import onnx_ir as ir
import pytest
import torch
from tiny_models import tiny_configs, tiny_model

from graphport.export.model_export import export
from graphport.export.pipeline import PASSES
from graphport.export.targets import CUDA, TargetError
from graphport.model_def.signature import FUSIONS_FILE, GRAPH_FILE

CONFIGS = tiny_configs()
PRECISIONS = [precision.name for precision in CUDA.precisions if not precision.keeps_blocks]

Graphs = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The graph file of a tiny model, by kind and precision."""

    @functools.cache
    def exported(kind: str, precision: str) -> Path:
        out, budget = tmp_path_factory.mktemp(kind) / precision, 0.1 if precision == "auto" else None
        model = tiny_model(CONFIGS[kind])
        bundle = export(model, out, target="cuda", precision=precision, max_kl=budget, verify=False)
        return bundle.path / GRAPH_FILE

    return exported


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_node_is_placed_on_cuda_in_every_precision(
    precision: str, graph: Graphs, cuda: cuda_stubs.Placer
) -> None:
    placement = cuda.place(graph("grouped_query", precision))
    assert placement.cpu == {}
    assert placement.cuda["GroupQueryAttention"] == 2


@pytest.mark.real
@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_every_node_of_smollm2_is_placed_on_cuda(
    precision: str, smollm2_gguf: Path, tmp_path: Path, cuda: cuda_stubs.Placer
) -> None:
    bundle = export(smollm2_gguf, tmp_path / "bundle", target="cuda", precision=precision, context=256, verify=False)
    placement = cuda.place(bundle.path / GRAPH_FILE, enable_cuda_graph="1")
    assert placement.cpu == {}
    assert placement.cuda["GroupQueryAttention"] == 30
    assert placement.cuda["TopK"] == placement.cuda["ArgMax"] == 1  # the logits are reduced where they lie


def test_capture_as_a_cuda_graph_is_accepted(graph: Graphs, cuda: cuda_stubs.Placer) -> None:
    assert cuda.place(graph("qk_norm", "fp16"), enable_cuda_graph="1").cpu == {}


@pytest.mark.parametrize("kv_cache", [cache.name for cache in CUDA.caches])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_quantised_cache_is_placed_on_cuda_and_accepted_for_capture(
    precision: str, kv_cache: str, tmp_path: Path, cuda: cuda_stubs.Placer
) -> None:
    model = tiny_model(CONFIGS["grouped_query"])
    bundle = export(model, tmp_path / "b", target="cuda", precision=precision, kv_cache=kv_cache, verify=False)
    placement = cuda.place(bundle.path / GRAPH_FILE, enable_cuda_graph="1")
    assert placement.cpu == {}
    assert placement.cuda["GroupQueryAttention"] == 2


def test_norms_of_heads_stay_outside_an_attention_with_a_quantised_cache(
    tmp_path: Path, cuda: cuda_stubs.Placer
) -> None:
    model = tiny_model(CONFIGS["qk_norm"])
    bundle = export(model, tmp_path / "bundle", target="cuda", precision="fp16", kv_cache="int8", verify=False)
    assert bundle.fusions["qk_norm"] == 0
    placement = cuda.place(bundle.path / GRAPH_FILE)
    assert placement.cuda["SimplifiedLayerNormalization"] == 1 + 2 * 2  # the first, and two a layer
    account = json.loads((bundle.path / FUSIONS_FILE).read_text(encoding="utf-8"))
    (rule,) = [rule for rule in account["rules"] if rule["rule"] == "qk_norm"]
    assert [(miss["check"], miss["found"]) for miss in rule["missed"]] == [
        ("the KV cache is not quantised", "int8")
    ] * 2


def test_attention_takes_packed_heads_and_their_norms(graph: Graphs) -> None:
    model = ir.load(graph("qk_norm", "fp16"))
    kernels = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.inputs[1] is None
        assert kernel.inputs[2] is None
        norms = kernel.inputs[14:16]
        assert all(value is not None and value.dtype == ir.DataType.FLOAT16 for value in norms)
        assert kernel.attributes["qk_norm_epsilon"].as_float() == pytest.approx(1e-6)
    assert not [
        node for node in model.graph if node.op_type in ("RMSNorm", "Split") and "attention" in (node.name or "")
    ]


def test_a_float32_attention_would_land_on_the_cpu_and_is_seen(tmp_path: Path, cuda: cuda_stubs.Placer) -> None:
    bundle = export(tiny_model(CONFIGS["grouped_query"]), tmp_path / "cpu", precision="fp32", verify=False)
    assert cuda.place(bundle.path / GRAPH_FILE).cpu["GroupQueryAttention"] == 2


def test_an_unknown_provider_option_is_refused_by_name(graph: Graphs, cuda: cuda_stubs.Placer) -> None:
    with pytest.raises(AssertionError, match="no_such_option"):
        cuda.place(graph("grouped_query", "fp16"), no_such_option="1")


def test_the_norms_move_inside_after_attention_is_lowered() -> None:
    names = [graph_pass.__name__ for graph_pass in PASSES]
    assert names.index("lower_attention") < names.index("fuse_qk_norm") < names.index("lower_norm")


def test_b50_activations_beyond_float16_are_refused_with_the_layer(tmp_path: Path) -> None:
    model = tiny_model(CONFIGS["grouped_query"])
    with torch.no_grad():
        model.layers[1].feed_forward.down.weight.mul_(3e4)
    with pytest.raises(TargetError, match=r"layer 1 feed_forward.down reaches .* beyond float16's 65504.*bf16"):
        export(model, tmp_path / "fp16", target="cuda", precision="fp16", verify=False)
    assert not list(tmp_path.iterdir())
    export(model, tmp_path / "bf16", target="cuda", precision="bf16", verify=False)


_OPTIMISED = """
import sys
import onnx
import onnxruntime
make = onnxruntime.InferenceSession

def saving(path, options, **arguments):
    options.optimized_model_filepath = sys.argv[2]
    return make(path, options, **arguments)

onnxruntime.InferenceSession = saving
from graphport.runtime import load
load(sys.argv[1], device="cuda").close()
for node in onnx.load(sys.argv[2], load_external_data=False).graph.node:
    if node.op_type == "MatMulNBits":
        print(len(node.input), sorted((a.name, a.i) for a in node.attribute if a.name in ("bits", "block_size")))
"""


@pytest.mark.parametrize("bits", [4, 8])
def test_products_keep_the_form_of_the_compact_gemm_when_biases_follow_them(
    bits: int, graph: Graphs, stubs: Path, tmp_path: Path
) -> None:
    """Blocks of 32, no zero points, no bias: what remains after ONNX Runtime's own optimiser."""
    folder = graph("all_biases", f"int{bits}").parent
    done = cuda_stubs.run_python(stubs, _OPTIMISED, str(folder), str(tmp_path / "optimised.onnx"))
    assert done.returncode == 0, done.stderr[-2000:]
    head = "3 [('bits', 8), ('block_size', 32)]"
    assert done.stdout.splitlines() == [f"3 [('bits', {bits}), ('block_size', 32)]"] * 8 + [head]
