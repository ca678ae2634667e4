"""The compilation as a whole: every pass on every kind of model, the counts it owes, the errors when one is missing."""

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest
from parity import TOLERANCES
from tiny_graphs import (
    CONFIGS,
    change_attention,
    compiled,
    count_ops,
    decoder_feed,
    eager_step,
    exported,
    interface,
    largest_difference,
    make_block,
    make_config,
    make_plan,
    open_graph,
    run_graph,
    run_session,
    tiny_model,
)

from graphport.export.clean_graph import clean_graph, finish_graph
from graphport.export.convert_floats import convert_floats
from graphport.export.fusion_report import fusion_account
from graphport.export.graph_pass import Miss, PassReport
from graphport.export.pack_projections import pack_gate_up, pack_qkv
from graphport.export.pipeline import (
    PASSES,
    RULES,
    FusionError,
    check_fusions,
    compile_graph,
    count_fusions,
    expected_fusions,
    require_fusions,
)
from graphport.export.targets import CUDA, TargetError

MOVE_DATA_ONLY = (clean_graph, pack_qkv, pack_gate_up, convert_floats, finish_graph)
STEPS = (((0,), 7), ((0, 0, 0), 5), ((9, 3, 1), 1), ((9,), 3))  # what GroupQueryAttention takes


@pytest.mark.parametrize("name", CONFIGS)
def test_every_pass_keeps_the_outputs_and_their_values(name: str) -> None:
    config, model = CONFIGS[name], exported(name)
    plan, before = make_plan(config), interface(model)
    feeds = [decoder_feed(config, lengths, num_new) for lengths, num_new in STEPS]
    wanted = [run_graph(model, feed) for feed in feeds]
    matrices = count_ops(model)["Linear"]
    for graph_pass in PASSES:
        graph_pass(model, plan)
        assert interface(model) == before, graph_pass.__name__  # B64
        counts = count_ops(model)
        products = sum(counts.get(op_type, 0) for op_type in ("Linear", "MatMul", "Gemm"))
        assert products <= matrices, graph_pass.__name__  # B65
        session = open_graph(model)
        found = [run_session(session, feed) for feed in feeds]
        tolerance = 0.0 if graph_pass in MOVE_DATA_ONLY else TOLERANCES["compiled", "float32"]
        for now, then, feed in zip(found, wanted, feeds, strict=True):
            assert largest_difference(now, then, feed) <= tolerance, graph_pass.__name__  # B66: the guilty pass
        wanted = found
    eager = eager_step(tiny_model(name), feeds[2])
    assert largest_difference(wanted[2], eager, feeds[2]) <= TOLERANCES["compiled", "float32"]


@pytest.mark.parametrize("name", CONFIGS)
def test_b62_every_layer_of_every_kind_fuses(name: str) -> None:
    config = CONFIGS[name]
    model, reports = compiled(name)
    counts = count_fusions(reports)
    assert expected_fusions(make_plan(config)).items() <= counts.items()
    assert counts["packed_qkv"] == config.num_layers
    ops = count_ops(model)
    lowered = 2 if name == "mixed" else config.num_layers  # a head size of 12 has no kernel
    assert ops["GroupQueryAttention"] == counts["attention"] == lowered
    assert not {"RMSNorm", "Linear", "Sigmoid", "Dropout", "Identity", "Constant"} & set(ops)
    sites = [site for report in reports for site in (*report.fused, *(miss.site for miss in report.missed))]
    assert not [
        site for site in sites if site.startswith(("add_", "val_", "node_"))
    ]  # every site has a place in the model


def test_the_llama_graph_has_no_node_to_spare() -> None:
    model, _ = compiled("llama")
    assert count_ops(model) == {
        "Gather": 3,  # embedding and the rows asked for, twice
        "SimplifiedLayerNormalization": 1,
        "SkipSimplifiedLayerNormalization": 4,
        "MatMul": 8,
        "Gemm": 1,
        "GroupQueryAttention": 2,
        "Split": 2,
        "QuickGelu": 2,
        "Mul": 2,
        "Reshape": 2,
    }


@pytest.mark.parametrize("name", ["llama", "post"])
def test_b46_fused_attention_equals_its_body_when_scores_reach_1e5(name: str) -> None:
    """Masked keys have no weight whatever the scores: a finite fill would show among scores of this size."""
    model = exported(name)
    clean_graph(model)
    for layer in range(2):
        for part in ("query", "key"):
            value = model.graph.initializers[f"blocks.{layer}.attention.{part}.weight"]
            assert value.const_value is not None
            value.const_value = ir.tensor(value.const_value.numpy() * 100, name=value.name)
    feeds = [decoder_feed(CONFIGS[name], lengths, num_new) for lengths, num_new in STEPS]
    for feed in feeds:
        for key in [key for key in feed if key.endswith(".key")]:
            feed[key] = feed[key] * 100
    wanted = [run_graph(model, feed) for feed in feeds]
    query, key = (np.abs(wanted[0][f"present.{layer}.key"][:, :, :7]).max() for layer in (0, 1))
    assert min(query, key) > 150  # keys of 16 such values, and queries like them: scores of 16 * 150 * 150 / 4
    compile_graph(model, make_plan(CONFIGS[name]))
    for feed, want in zip(feeds, wanted, strict=True):
        assert np.abs(run_graph(model, feed)["logits"] - want["logits"]).max() <= 1e-3


@pytest.mark.parametrize("heads", [{"num_heads": 8}, {"num_heads": 3, "num_kv_heads": 3}])
def test_b33_a_config_with_other_heads_than_the_graph_is_an_error(heads: dict[str, int]) -> None:
    plan = make_plan(change_attention(CONFIGS["llama"], **heads))
    pattern = rf"rule attention fused 0 sites, 2 are called for.*4 query .* in the graph, {heads['num_heads']} query"
    with pytest.raises(FusionError, match=pattern):
        compile_graph(exported("llama"), plan)


@pytest.mark.parametrize("change", ["one layer less", "one layer more"])
def test_a_config_with_another_number_of_layers_is_an_error(change: str) -> None:
    config = CONFIGS["llama"]
    blocks = config.blocks[:1] if change == "one layer less" else (*config.blocks, config.blocks[0])
    with pytest.raises(FusionError, match=r"rule residual_norm fused 4 sites"):
        compile_graph(exported("llama"), make_plan(dataclasses.replace(config, blocks=blocks)))


def _break(model: ir.Model, op_type: str, index: int) -> None:
    """Put a Neg before an input of the first such node."""
    node = next(n for n in model.graph if n.op_type == op_type)
    value = node.inputs[index]
    assert value is not None
    copy = ir.node("Neg", [value])
    copy.outputs[0].dtype, copy.outputs[0].shape = value.dtype, value.shape
    model.graph.insert_before(node, copy)
    node.replace_input_with(index, copy.outputs[0])


@pytest.mark.parametrize(
    ("op_type", "index", "message"),
    [
        (
            "RotaryCachedAttention",
            1,
            "rule packed_qkv fused 1 sites, 2 are called for. layer 0 attention: .*number 1 is not",
        ),
        ("Sigmoid", 0, "rule packed_gate_up fused 1 sites, 2 are called for. No candidate seen"),
    ],
)
def test_b62_a_fusion_that_did_not_happen_names_check_and_value(op_type: str, index: int, message: str) -> None:
    model = exported("llama")
    clean_graph(model)
    _break(model, op_type, index)
    with pytest.raises(FusionError, match=message):
        compile_graph(model, make_plan(CONFIGS["llama"]))


def test_b62_a_residual_behind_another_node_is_blamed() -> None:
    model = exported("llama")
    clean_graph(model)
    norm = [n for n in model.graph if n.op_type == "RMSNorm"][1]
    assert norm.inputs[0] is not None
    copy = ir.node("Neg", [norm.inputs[0]])
    model.graph.insert_before(norm, copy)
    norm.replace_input_with(0, copy.outputs[0])
    pattern = (
        "residual_norm fused 3 sites, 4 .*layer 0 feed_forward_norm: needs that the norm's input is an Add, found Neg"
    )
    with pytest.raises(FusionError, match=pattern):
        compile_graph(model, make_plan(CONFIGS["llama"]))


REPORTS = (
    PassReport(rule="clean", fused=("3 nodes removed",)),
    PassReport(rule="silu", fused=("layer 0",), missed=(Miss(site="layer 1", check="it is so", found="not so"),)),
    PassReport(rule="norm", fused=("final_norm",)),
)


def test_required_counts_are_checked_with_the_value_to_blame() -> None:
    require_fusions(REPORTS, {"silu": 1, "norm": "all"})
    check_fusions(REPORTS, {"silu": 1})
    with pytest.raises(
        FusionError, match=r"rule silu fused 1 sites, 2 are called for. layer 1: needs that it is so, found not so"
    ):
        require_fusions(REPORTS, {"silu": 2})
    with pytest.raises(FusionError, match=r"rule norm fused 1 sites, 0 are called for. No candidate seen"):
        check_fusions(REPORTS, {"norm": 0})
    with pytest.raises(FusionError, match=r"rule silu is required everywhere; it fused 1 sites. layer 1: needs"):
        require_fusions(REPORTS, {"silu": "all"})
    with pytest.raises(FusionError, match="no rule is called 'sillu'; the rules are smoothed, residual_norm, "):
        require_fusions(REPORTS, {"sillu": 1})


def test_expected_fusions_are_counted_from_the_config_alone() -> None:
    post = make_block(norm_order="post")
    cases = {
        4: make_config(),
        3: make_config(final_norm=None),
        5: CONFIGS["gpt"],
        6: make_config(make_block(), make_block(norm_order="sandwich"), make_block()),
    }
    for wanted, config in cases.items():
        assert expected_fusions(make_plan(config))["residual_norm"] == wanted
    assert expected_fusions(make_plan(make_config(post, make_block(), post)))["residual_norm"] == 2 + 1 + 2
    assert expected_fusions(make_plan(CONFIGS["mixed"])) == {
        "residual_norm": 5,
        "packed_qkv": 3,
        "packed_gate_up": 2,
        "silu": 2,
        "attention": 2,
        "window_cache": 0,
        "qk_norm": 0,
        "experts": 0,
        "kv_cache": 0,
        "sampling": 0,
    }


def test_the_account_holds_sites_and_misses() -> None:
    account = fusion_account(REPORTS, num_nodes=7)
    assert account["nodes"] == 7
    assert account["counts"] == {"silu": 1, "norm": 1}
    assert [rule["rule"] for rule in account["rules"]] == ["silu", "norm"]
    assert account["rules"][0]["missed"] == ({"site": "layer 1", "check": "it is so", "found": "not so"},)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "post"])
def test_b60_dynamic_axes_survive_every_precision(name: str, precision: str) -> None:
    config = CONFIGS[name]
    model, _ = compiled(name, precision)
    assert interface(model) == interface(exported(name))
    session = open_graph(model)
    dims = {value.name: value.shape for value in session.get_inputs()}
    assert dims["input_ids"] == ["batch", "sequence"]
    assert dims["past_key_values.0.key"] == ["batch", 2, "capacity", 16]
    for batch, num_new, past in ((1, 1, 0), (1, 1, 9), (3, 17, 0), (1, 17, 9), (3, 1, 9)):
        for capacity in (26, 40):
            feed = decoder_feed(config, (past,) * batch, num_new, capacity=capacity)
            logits = run_session(session, feed)["logits"]
            assert logits.shape == (batch * num_new, config.vocab_size)
            assert np.isfinite(logits).all()


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_cuda_graphs_are_half_precision_with_float32_logits(name: str, precision: str) -> None:
    model, reports = compiled(name, precision, target=CUDA)
    half = ir.DataType.BFLOAT16 if precision == "bf16" else ir.DataType.FLOAT16
    floats = {value.name: value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
    assert floats.pop("logits") == ir.DataType.FLOAT
    assert {dtype for name, dtype in floats.items() if name.startswith(("past", "present"))} == {half}
    for value in model.graph.initializers.values():
        assert value.dtype in (half, ir.DataType.INT64, ir.DataType.INT32, ir.DataType.UINT8), value.name
        assert value.const_value is not None
        assert value.const_value.numpy().shape == tuple(value.shape or ())
    kernels = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert len(kernels) == CONFIGS[name].num_layers
    assert all(node.outputs[0].dtype == half for node in kernels)
    assert ("half_precision", 1) in count_fusions(reports).items()
    quantised = {node.op_type for node in model.graph} & {"MatMulNBits", "GatherBlockQuantized"}
    assert len(quantised) == (2 if precision.startswith("int") else 0)


def test_fp16_refuses_a_weight_that_overflows_by_name() -> None:
    model = exported("llama")
    value = model.graph.initializers["blocks.1.feed_forward.down.weight"]
    assert value.const_value is not None
    large = value.const_value.numpy().copy()
    large[3, 5] = -1e5
    value.const_value = ir.tensor(large, name=value.name)
    plan = make_plan(CONFIGS["llama"], "fp16", target=CUDA)
    with pytest.raises(TargetError, match=r"blocks.1.feed_forward.down.weight reaches 1e\+05, beyond FLOAT16; .*bf16"):
        compile_graph(model, plan)
    wide = exported("llama")
    wide.graph.initializers["blocks.1.feed_forward.down.weight"].const_value = ir.tensor(large, name=value.name)
    compile_graph(wide, make_plan(CONFIGS["llama"], "bf16", target=CUDA))
    ir.to_proto(wide)


def test_every_pass_reports_in_order() -> None:
    rules = [report.rule for report in compile_graph(exported("llama"), make_plan(CONFIGS["llama"]))]
    assert len(rules) == len(PASSES)
    assert tuple(dict.fromkeys(rule for rule in rules if rule != "clean")) == RULES  # two passes lower attention
    assert (rules[0], rules[-1]) == ("clean", "clean")
