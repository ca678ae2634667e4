"""Every decoder family: its config is read, its weights are read, eager equals transformers."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import RELATIVE_TOLERANCES
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, relative_difference, token_ids
from tiny_decoder_values import POSITIONS
from tiny_decoders import DECODERS, make_decoder

from graphport.export.float_loss import float64_parameters
from graphport.model_def.block_config import BlockConfig
from graphport.model_def.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from graphport.model_def.expert_config import ExpertsConfig
from graphport.model_def.huggingface import read_folder_config
from graphport.model_def.position_config import AlibiBias
from graphport.model_def.transformer import Transformer

TOLERANCE = RELATIVE_TOLERANCES["checkpoint", "float32"]

ROUTER_FAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_chosen_groups": 1},
    "deepseek_v2 greedy": {"scaling": 1.0},
    "deepseek_v3": {"num_chosen_groups": 1},
    "deepseek_v3 by halves": {"scores": "softmax"},
}

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a family's model, saved once."""
    made: dict[str, Path] = {}

    def saved(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("family")
            make_decoder(name).save_pretrained(made[name])
        return made[name]

    return saved


@pytest.mark.parametrize("name", DECODERS)
def test_a_family_equals_transformers_at_every_length(name: str, folder: Folders) -> None:
    checkpoint = load_checkpoint(folder(name))
    assert read_folder_config(folder(name)) == checkpoint.config
    for length in (4, 12, POSITIONS):  # inside the window, beyond it, beyond the original length of a scaling
        found = relative_difference(checkpoint, make_decoder(name), token_ids(length))
        assert found < TOLERANCE, f"{length} tokens: {found}"


@pytest.mark.parametrize("name", DECODERS)
def test_a_family_runs_in_float64_where_its_parameters_are(name: str, folder: Folders) -> None:
    checkpoint = load_checkpoint(folder(name))
    model = Transformer(checkpoint.config).eval()
    model.load_state_dict(checkpoint.weights)
    ids = token_ids(12)
    with torch.inference_mode():
        expected = model(ids)
        with float64_parameters(model):
            wide = model(ids)
    assert (wide.dtype, expected.dtype) == (torch.float64, torch.float32)
    assert 0 < float((wide - expected).abs().max() / expected.abs().max()) < TOLERANCE


def _without(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The checkpoint read as if its family lacked one thing."""

    def change(block: BlockConfig) -> BlockConfig:
        attention = block.attention
        if name == "falcon new" or name.startswith("gpt_neox"):
            order = "pre" if block.norm_order == "parallel" else "parallel"
            return dataclasses.replace(block, norm_order=order)
        if name == "qwen2_moe" and isinstance(block.feed_forward, ExpertsConfig):
            return dataclasses.replace(block, feed_forward=dataclasses.replace(block.feed_forward, normalized=True))
        if name.startswith("deepseek") and isinstance(block.feed_forward, ExpertsConfig):
            router = dataclasses.replace(block.feed_forward.router, **ROUTER_FAULTS[name])
            return dataclasses.replace(block, feed_forward=dataclasses.replace(block.feed_forward, router=router))
        if name == "falcon with alibi":
            return dataclasses.replace(block, attention=dataclasses.replace(attention, scale=0.3))
        if name == "granite":
            return dataclasses.replace(block, residual_scale=1.0)
        if name == "cohere":
            assert attention.rotary is not None
            rotary = dataclasses.replace(attention.rotary, interleaved=False)
            return dataclasses.replace(block, attention=dataclasses.replace(attention, rotary=rotary))
        if name == "gpt_neo":
            return dataclasses.replace(block, attention=dataclasses.replace(attention, scale=None))
        if name == "gemma3_text" and attention.window is not None:
            return dataclasses.replace(block, attention=dataclasses.replace(attention, window=attention.window + 1))
        if name == "gemma2":
            return dataclasses.replace(block, attention=dataclasses.replace(attention, softcap=None))
        return block

    blocks = tuple(change(block) for block in checkpoint.config.blocks)
    if name == "smollm3":
        blocks = (blocks[0], blocks[0])
    if name == "gpt2 scaled by layer":
        attention = dataclasses.replace(blocks[1].attention, scale=None)
        blocks = (blocks[0], dataclasses.replace(blocks[1], attention=attention))
    bias = AlibiBias(rounded=True) if name == "bloom" else checkpoint.config.relative_bias
    config = dataclasses.replace(checkpoint.config, blocks=blocks, relative_bias=bias)
    return dataclasses.replace(checkpoint, config=config)


@pytest.mark.parametrize(
    "name",
    [
        *("falcon new", "gpt_neox", "gpt_neox serial", "granite", "cohere", "gemma2", "gemma3_text", "smollm3"),
        *("gpt2 scaled by layer", "qwen2_moe", "gpt_neo", "falcon with alibi", "bloom", *ROUTER_FAULTS),
    ],
)
def test_b25_b44_a_family_read_without_what_is_its_own_is_rejected(name: str, folder: Folders) -> None:
    checkpoint = load_checkpoint(folder(name))
    broken = _without(checkpoint, name)
    assert broken.config != checkpoint.config
    assert relative_difference(broken, make_decoder(name), token_ids(12)) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["gpt_neox", "falcon new", "phi3"])
def test_a_fused_matrix_split_in_the_wrong_order_is_rejected(name: str, folder: Folders) -> None:
    checkpoint = load_checkpoint(folder(name))
    weights = dict(checkpoint.weights)
    query, key, value = (weights[f"blocks.0.attention.{part}.weight"] for part in ("query", "key", "value"))
    mixed = torch.cat((key, query, value))
    sizes = [len(part) for part in (query, key, value)]
    for part, rows in zip(("query", "key", "value"), mixed.split(sizes), strict=True):
        weights[f"blocks.0.attention.{part}.weight"] = rows
    broken = dataclasses.replace(checkpoint, weights=weights)
    assert relative_difference(broken, make_decoder(name), token_ids(12)) > 100 * TOLERANCE


def _edited(folder: Path, to: Path, **changes: object) -> Path:
    """A copy of a folder with other keys in its config; None removes one."""
    shutil.copytree(folder, to)

    def change(values: dict[str, Any]) -> None:
        values.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del values[key]

    edit_json(to / "config.json", change)
    return to


def _renamed(folder: Path, to: Path, rename: Callable[[str], str], **extra: torch.Tensor) -> Path:
    """A copy of a folder whose tensors have other names, with `extra` ones."""
    shutil.copytree(folder, to)
    path = to / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()} | extra, path)
    return to


def test_gpt2_is_read_as_the_hub_stores_it_without_prefix_and_with_its_masks(folder: Folders, tmp_path: Path) -> None:
    mask = {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    hub = _renamed(folder("gpt2"), tmp_path / "hub", lambda name: name.removeprefix("transformer."), **mask)
    checkpoint = load_checkpoint(hub)
    assert relative_difference(checkpoint, make_decoder("gpt2"), token_ids(12)) < TOLERANCE
    assert "ignored tensors: h.0.attn.bias, h.1.attn.masked_bias" in checkpoint.notes


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_are_read_as_transformers_has_them_in_memory(name: str, folder: Folders, tmp_path: Path) -> None:
    make_decoder(name).save_pretrained(tmp_path, save_original_format=False)
    fused, each = load_checkpoint(tmp_path), load_checkpoint(folder(name))
    assert fused.config == each.config
    assert all(torch.equal(fused.weights[key], weight) for key, weight in each.weights.items())
    held = {key.rpartition(".experts.")[2] for key in load_file(tmp_path / "model.safetensors") if ".experts." in key}
    assert held == {"gate_up_proj", "down_proj"}


def test_experts_whose_gate_is_taken_for_up_are_rejected(folder: Folders) -> None:
    checkpoint = load_checkpoint(folder("mixtral"))
    weights = dict(checkpoint.weights)
    gate, up = (f"blocks.0.feed_forward.experts.{part}.weight" for part in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]
    broken = dataclasses.replace(checkpoint, weights=weights)
    assert relative_difference(broken, make_decoder("mixtral"), token_ids(12)) > 100 * TOLERANCE


def test_layers_that_predict_further_tokens_are_left_out(folder: Folders, tmp_path: Path) -> None:
    extra = {"model.layers.2.eh_proj.weight": torch.ones(2, 2), "model.layers.2.input_layernorm.weight": torch.ones(2)}
    hub = load_checkpoint(_renamed(folder("deepseek_v3"), tmp_path / "hub", lambda name: name, **extra))
    assert "ignored tensors: model.layers.2.eh_proj.weight, model.layers.2.input_layernorm.weight" in hub.notes
    assert hub.config == load_checkpoint(folder("deepseek_v3")).config


@pytest.mark.parametrize("head", ["embed_out", "lm_head"])
def test_the_head_of_gpt_neox_has_either_name(head: str, folder: Folders, tmp_path: Path) -> None:
    def rename(name: str) -> str:
        return f"{head}.weight" if name in ("embed_out.weight", "lm_head.weight") else name

    checkpoint = load_checkpoint(_renamed(folder("gpt_neox"), tmp_path / "hub", rename))
    assert checkpoint.config.head == "separate"
    assert relative_difference(checkpoint, make_decoder("gpt_neox"), token_ids(12)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt_neox", {"rope_parameters": None, "rotary_pct": 0.25, "rotary_emb_base": 100.0}),
        (
            "phi3 longrope",
            {"rope_parameters": DECODERS["phi3 longrope"].values["rope_parameters"] | {"rope_type": "su"}},
        ),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
        ("phi", {"auto_map": {"AutoModelForCausalLM": "modeling_phi.PhiForCausalLM"}}),
        ("starcoder2", {"norm_type": "layer_norm", "mlp_type": "default", "activation_function": "gelu"}),
        ("opt", {"layerdrop": 0.1, "dropout": 0.1}),
        ("gpt2", {"n_ctx": 48, "summary_type": "cls_index"}),
    ],
)
def test_the_spellings_of_the_hub_are_read_alike(
    name: str, changes: dict[str, Any], folder: Folders, tmp_path: Path
) -> None:
    hub = load_checkpoint(_edited(folder(name), tmp_path / "hub", **changes))
    assert hub.config == load_checkpoint(folder(name)).config


def test_gemma3_in_the_old_spelling_has_a_base_and_a_scaling_a_kind_of_layer(folder: Folders, tmp_path: Path) -> None:
    old = {
        "rope_parameters": None,
        "layer_types": None,
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_local_base_freq": 50.0,
        "sliding_window_pattern": 2,
    }
    hub = load_checkpoint(_edited(folder("gemma3_text"), tmp_path / "hub", **old))
    assert hub.config == load_checkpoint(folder("gemma3_text")).config


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("falcon", {"alibi": 1}, "alibi must be true or false, got 1"),
        ("bloom", {"slow_but_exact": True}, "model_type bloom .* slow_but_exact = True"),
        ("falcon new", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn 3 with new_decoder_architecture True"),
        ("falcon", {"num_attention_heads": 7}, r"hidden_size \(96\) is no multiple of num_attention_heads \(7\)$"),
        ("falcon new", {"num_kv_heads": 4}, r"num_heads \(6\) must be divisible by num_kv_heads \(4\)"),
        ("opt", {"word_embed_proj_dim": 48}, r"missing: model.decoder.project_in.weight"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = False"),
        ("stablelm", {"qk_layernorm": True}, r"missing: .*self_attn.k_layernorm.norms.0.weight"),
        ("stablelm", {"num_key_value_heads": 4}, r"num_heads \(6\) must be divisible by num_kv_heads \(4\)"),
        ("gpt_neo", {"attention_layers": ["local", "global"]}, "must name 2 layers global or local, and alike"),
        (
            "gpt_neo",
            {"attention_types": [["global", 2]], "attention_layers": None},
            "must name 2 layers global or local",
        ),
        ("gpt_neo", {"attention_types": 3}, "attention_types must list names and how often they repeat; got 3"),
        (
            "gpt_neo",
            {"attention_types": None, "attention_layers": None},
            "attention_layers or attention_types must say which layers are local",
        ),
        ("gpt_neo", {"window_size": 0}, "window_size must be a positive integer, got 0"),
        ("gpt2", {"head_dim": 16}, "model_type gpt2 .* head_dim = 16"),
        ("gpt2", {"n_head": 5}, r"n_embd \(48\) is no multiple of n_head \(5\)$"),
        ("gpt2", {"activation_function": "relu2"}, "activation_function 'relu2' is not supported; known are silu"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True"),
        ("gpt_neox", {"rotary_pct": 0.5}, "partial_rotary_factor is 0.5 in config.json and 0.25"),
        ("gemma2", {"num_key_value_heads": None}, "num_key_value_heads is missing; model_type gemma2 needs it"),
        ("gemma2", {"query_pre_attn_scalar": "x"}, "query_pre_attn_scalar must be a positive number, got 'x'"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier must be a positive number, got 0"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu' of a mixture of experts is not read; known is silu"),
        ("mixtral", {"num_local_experts": None}, "number of experts must be in num_local_experts; found none"),
        ("mixtral", {"num_experts_per_tok": 6}, "a token runs 6 experts, of which there are 5"),
        ("mixtral", {"norm_topk_prob": True}, "model_type mixtral .* norm_topk_prob = True"),
        ("qwen2_moe", {"mlp_only_layers": [2]}, r"mlp_only_layers must list layers below 2; got \[2\]"),
        ("qwen2_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, got 1"),
        ("qwen3_moe", {"num_experts": 4}, "found num_experts 4, num_local_experts 5"),
        ("qwen3_moe", {"moe_intermediate_size": 24}, r"experts.0.down_proj.weight is \[42, 20\], .* \[42, 24\]"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 28}, "shared_expert_intermediate_size = 28"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not read; known are greedy and group_"),
        ("deepseek_v2", {"norm_topk_prob": True}, "model_type deepseek_v2 .* norm_topk_prob = True"),
        ("deepseek_v2", {"n_group": 4}, "6 experts do not lie in 4 equal groups"),
        ("deepseek_v2", {"topk_group": 4}, "chooses from 4 groups of experts, of which there are 3"),
        ("deepseek_v2", {"num_key_value_heads": 1}, r"num_kv_heads \(1\) must be num_heads \(3\)"),
        ("deepseek_v2", {"v_head_dim": 64}, r"value_dim \(64\) is above head_dim \(48\)"),
        ("deepseek_v2", {"kv_lora_rank": None}, "kv_lora_rank must be a positive integer, got None"),
        ("deepseek_v2", {"q_lora_rank": None}, r"missing: .*self_attn.q_proj.weight"),
        ("deepseek_v3", {"topk_method": "greedy"}, "model_type deepseek_v3 .* topk_method = 'greedy'"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "a token runs 5 experts from 2 groups of 2"),
        ("deepseek_v3", {"routed_scaling_factor": 0}, "scaling of the router must be a positive number, got 0"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            "model_type deepseek_v3 .* quantization_config",
        ),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config .*'awq'.* known is .* mxfp4",
        ),
        ("gpt_oss", {"rope_parameters": None}, "gpt_oss needs rope_scaling or rope_parameters"),
        ("gpt_oss", {"swiglu_limit": 0}, "limit of the experts must be a positive number, got 0"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers must list 2 of 0 and 1; got \[1\]"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval must be a positive"),
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 5, "layer_types": None},
            "layer_types does not say which layers slide",
        ),
    ],
)
def test_what_a_family_cannot_have_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, folder: Folders, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(_edited(folder(name), tmp_path / "edited", **changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "yi"}, "'yi' is not read; known are llama, .*; llama has all of its keys"),
        (
            "llama",
            {"model_type": "llamax", "num_experts": 8, "router": "top"},
            "nearest: llama; nearest by its keys is llama, which it is kept from by num_experts = 8, router = 'top'",
        ),
        (
            "gpt2",
            {"model_type": "imagegpt", "n_layer": None},
            r"nearest by its keys is gpt2, which it is kept from by n_layer \(missing\)",
        ),
    ],
)
def test_an_unknown_model_type_is_told_the_nearest_and_what_keeps_it_from_it(
    name: str, changes: dict[str, Any], message: str, folder: Folders, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(_edited(folder(name), tmp_path / "edited", **changes))


def test_an_adapter_is_refused_with_the_way_to_merge_it(folder: Folders, tmp_path: Path) -> None:
    adapter = _edited(folder("gpt2"), tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match=r"is an adapter \(adapter_config.json\).*merge_and_unload"):
        load_checkpoint(adapter)
