"""The Hugging Face decoders whose norms are LayerNorm, one record a `model_type`: GPT-2 and its kin.

In: nothing. Out: `LAYER_NORM_DECODERS`. A row says what a family fixes beyond the defaults of `DecoderFamily`, as
transformers' configuration and modelling classes have it; the keys are read in `huggingface_config.py`.
"""

import dataclasses

from graphport.model_def import decoder_tensors
from graphport.model_def.block_config import NormConfig
from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.decoder_family import DecoderFamily, Flag, Number, keys_of
from graphport.model_def.huggingface_values import Values, read_flag
from graphport.model_def.huggingface_windows import WindowRule
from graphport.model_def.position_config import AlibiBias
from graphport.model_def.rotary_parameters import RotaryRule

_LAYER_NORM = NormConfig(kind="layer", bias=True)
_EPSILON, _FALCON_EPSILON = "layer_norm_eps", "layer_norm_epsilon"
_BIAS = Flag("attention_bias")


def _cohere(family: DecoderFamily, values: Values) -> DecoderFamily:
    has_norms = read_flag(values, "use_qk_norm")
    return dataclasses.replace(family, qk_norm_over="each_head") if has_norms else family


def _phi(family: DecoderFamily, values: Values) -> DecoderFamily:
    return dataclasses.replace(family, qk_norm_over="head") if read_flag(values, "qk_layernorm") else family


def _stablelm(family: DecoderFamily, values: Values) -> DecoderFamily:
    if read_flag(values, "qk_layernorm"):
        family = dataclasses.replace(family, qk_norm_over="each_head")
    if not read_flag(values, "use_parallel_residual"):
        return family
    return dataclasses.replace(family, norm_order="parallel", feed_forward_norm=False)


def _gpt_neox(family: DecoderFamily, values: Values) -> DecoderFamily:
    is_parallel = read_flag(values, "use_parallel_residual", default=True)
    return family if is_parallel else dataclasses.replace(family, norm_order="pre")


def _opt(family: DecoderFamily, values: Values) -> DecoderFamily:
    width, hidden = values.get("word_embed_proj_dim"), values.get("hidden_size")
    if width not in (None, hidden):
        family = dataclasses.replace(family, id_width_key="word_embed_proj_dim")
    if not read_flag(values, "do_layer_norm_before", default=True):
        return dataclasses.replace(family, norm_order="post", has_final_norm=False)
    return dataclasses.replace(family, has_final_norm=not read_flag(values, "_remove_final_layer_norm"))


def _falcon(family: DecoderFamily, values: Values) -> DecoderFamily:
    """One norm or two beside each other, or one after the other; a kv head for all, for groups, or for each."""
    is_new = read_flag(values, "new_decoder_architecture")
    is_parallel = read_flag(values, "parallel_attn", default=True)
    num_norms = values.get("num_ln_in_parallel_attn")
    num_norms = (2 if is_new else 1) if num_norms is None else num_norms
    if num_norms not in ((1, 2) if is_new else (1,)) or (is_new and num_norms == 1 and not is_parallel):
        raise CheckpointError(
            f"config.json: num_ln_in_parallel_attn {num_norms!r} with new_decoder_architecture {is_new} and "
            f"parallel_attn {is_parallel} is no shape of transformers' Falcon"
        )
    if not is_new:
        keys = keys_of(
            "kv_heads", "head_dim", width="ffn_hidden_size", activation="activation", epsilon=_FALCON_EPSILON
        )
        one_for_all = read_flag(values, "multi_query", default=True)
        family = dataclasses.replace(
            family, keys=keys, kv_heads=1 if one_for_all else None, ignored=(*family.ignored, "num_kv_heads")
        )
    if read_flag(values, "alibi"):
        ignored = (*family.ignored, *RotaryRule().keys)  # what would say how it rotates
        family = dataclasses.replace(family, rotary=None, alibi=AlibiBias(rounded=True), ignored=ignored)
    if is_new and num_norms == 2:
        return dataclasses.replace(family, tensors=decoder_tensors.FALCON_TWO_NORMS, feed_forward_norm=True)
    return family if is_parallel else dataclasses.replace(family, norm_order="pre", feed_forward_norm=True)


LAYER_NORM_DECODERS: tuple[DecoderFamily, ...] = (
    DecoderFamily(
        model_type="phi",
        tensors=decoder_tensors.PHI,
        keys=keys_of(epsilon=_EPSILON),
        kv_heads_default=True,
        epsilon=1e-5,
        activation="gelu_new",
        norm=_LAYER_NORM,
        norm_order="parallel",
        feed_forward_norm=False,
        gated=False,
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        head_bias=True,
        rotary=RotaryRule(partial_factor=0.5, reads_partial=True),
        refine=_phi,
        refined_by=("qk_layernorm",),
        ignored=("auto_map",),
    ),
    DecoderFamily(
        model_type="cohere",
        keys=keys_of(epsilon=_EPSILON),
        kv_heads_default=True,
        epsilon=1e-5,
        norm=NormConfig(kind="layer"),
        norm_order="parallel",
        feed_forward_norm=False,
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        rotary=RotaryRule(theta=500_000.0, interleaved=True),
        logit_scale=Number("logit_scale", 0.0625),
        refine=_cohere,
        refined_by=("use_qk_norm",),
    ),
    DecoderFamily(
        model_type="stablelm",
        tensors=decoder_tensors.STABLELM,
        qk_norm_bias=False,
        keys=keys_of("head_dim", epsilon=_EPSILON),
        epsilon=1e-5,
        norm=_LAYER_NORM,
        refine=_stablelm,
        refined_by=("use_parallel_residual", "qk_layernorm"),
        qkv_bias=Flag("use_qkv_bias"),
        rotary=RotaryRule(partial_factor=0.25, reads_partial=True),
        ignored=("auto_map",),
    ),
    DecoderFamily(
        model_type="starcoder2",
        tensors=decoder_tensors.STARCODER2,
        keys=keys_of(epsilon="norm_epsilon"),
        epsilon=1e-5,
        activation="gelu_pytorch_tanh",
        norm=_LAYER_NORM,
        gated=False,
        qkv_bias=Flag("use_bias", default=True),
        output_bias=Flag("use_bias", default=True),
        feed_forward_bias=Flag("use_bias", default=True),
        window=WindowRule(),
        neutral={"norm_type": ("layer_norm",), "mlp_type": ("default",), "scale_attn_weights": (True,)},
        ignored=(
            *("activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
            *("residual_dropout", "embedding_dropout"),
        ),
    ),
    DecoderFamily(
        model_type="gpt_neox",
        tensors=decoder_tensors.GPT_NEOX,
        keys=keys_of("kv_heads", "head_dim", epsilon=_EPSILON),
        epsilon=1e-5,
        activation="gelu",
        norm=_LAYER_NORM,
        norm_order="parallel",
        refine=_gpt_neox,
        refined_by=("use_parallel_residual",),
        gated=False,
        qkv_bias=Flag("attention_bias", default=True),
        output_bias=Flag("attention_bias", default=True),
        feed_forward_bias=True,
        rotary=RotaryRule(
            partial_factor=0.25,
            reads_partial=True,
            aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        ),
    ),
    DecoderFamily(
        model_type="gpt_neo",
        tensors=decoder_tensors.GPT_NEO,
        keys=keys_of(
            *("kv_heads", "head_dim"),
            layers="num_layers",
            heads="num_heads",
            activation="activation_function",
            epsilon="layer_norm_epsilon",
        ),
        epsilon=1e-5,
        activation="gelu_new",
        width_factor=4,
        norm=_LAYER_NORM,
        gated=False,
        output_bias=True,
        feed_forward_bias=True,
        rotary=None,
        position_offset=0,
        unscaled=True,
        window=WindowRule(
            default=256, size_key="window_size", names_key="attention_layers", pattern_key="attention_types"
        ),
        ignored=("resid_dropout", "embed_dropout", "gradient_checkpointing", "summary_type", "summary_use_proj"),
    ),
    DecoderFamily(
        model_type="gpt2",
        tensors=decoder_tensors.GPT2,
        keys=keys_of(
            *("kv_heads", "head_dim"),
            hidden_size="n_embd",
            width="n_inner",
            layers="n_layer",
            heads="n_head",
            positions="n_positions",
            activation="activation_function",
            epsilon="layer_norm_epsilon",
        ),
        epsilon=1e-5,
        activation="gelu_new",
        width_factor=4,
        norm=_LAYER_NORM,
        gated=False,
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        rotary=None,
        position_offset=0,
        scale_by_layer=Flag("scale_attn_by_inverse_layer_idx"),
        neutral={"scale_attn_weights": (None, True)},
        ignored=(
            *("n_ctx", "attn_pdrop", "reorder_and_upcast_attn", "summary_type", "summary_use_proj"),
            *("summary_activation", "summary_proj_to_labels", "summary_first_dropout", "gradient_checkpointing"),
        ),
    ),
    DecoderFamily(
        model_type="opt",
        tensors=decoder_tensors.OPT,
        keys=keys_of("kv_heads", "head_dim", "epsilon", width="ffn_dim", activation="activation_function"),
        epsilon=1e-5,
        activation="relu",
        norm=_LAYER_NORM,
        refine=_opt,
        refined_by=("word_embed_proj_dim", "do_layer_norm_before", "_remove_final_layer_norm"),
        gated=False,
        qkv_bias=Flag("enable_bias", default=True),
        output_bias=Flag("enable_bias", default=True),
        feed_forward_bias=Flag("enable_bias", default=True),
        rotary=None,
        position_offset=2,
        neutral={"layer_norm_elementwise_affine": (None, True)},
        ignored=("dropout", "layerdrop", "init_std", "activation_dropout"),
    ),
    DecoderFamily(
        model_type="falcon",
        tensors=decoder_tensors.FALCON,
        keys=keys_of(
            "head_dim",
            width="ffn_hidden_size",
            kv_heads="num_kv_heads",
            activation="activation",
            epsilon=_FALCON_EPSILON,
        ),
        kv_heads_default=True,
        epsilon=1e-5,
        activation="gelu",
        width_factor=4,
        norm=_LAYER_NORM,
        norm_order="parallel",
        feed_forward_norm=False,
        refine=_falcon,
        refined_by=("new_decoder_architecture", "parallel_attn", "num_ln_in_parallel_attn", "multi_query", "alibi"),
        gated=False,
        qkv_bias=Flag("bias"),
        output_bias=Flag("bias"),
        feed_forward_bias=Flag("bias"),
        neutral={"apply_residual_connection_post_layernorm": (None, False)},
        ignored=("auto_map",),
    ),
    DecoderFamily(
        model_type="bloom",
        tensors=decoder_tensors.BLOOM,
        keys=keys_of(
            *("kv_heads", "head_dim"),
            width="n_inner",
            layers="n_layer",
            heads="n_head",
            positions="seq_length",
            epsilon=_FALCON_EPSILON,
        ),
        epsilon=1e-5,
        activation="gelu_new",
        width_factor=4,
        norm=_LAYER_NORM,
        embedding_norm=True,
        gated=False,
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        rotary=None,
        alibi=AlibiBias(),
        neutral={"apply_residual_connection_post_layernorm": (None, False), "slow_but_exact": (None, False)},
        ignored=(
            *("offset_alibi", "masked_softmax_fusion", "attention_softmax_in_fp32", "bias_dropout_fusion"),
            *("skip_bias_add", "skip_bias_add_qkv", "unk_token_id"),
        ),
    ),
)
