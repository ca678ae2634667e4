"""The Hugging Face decoders whose norms are RMSNorm, one record a `model_type`: Llama and its kin.

In: nothing. Out: `RMS_DECODERS`. A row says what a family fixes beyond the defaults of `DecoderFamily`, as
transformers' configuration and modelling classes have it; the keys are read in `huggingface_config.py`.
"""

import dataclasses

from graphport.model_def import decoder_tensors
from graphport.model_def.block_config import NormConfig
from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.decoder_family import DecoderFamily, Flag, Number, keys_of
from graphport.model_def.expert_config import RouterConfig
from graphport.model_def.huggingface_experts import ExpertRule, Switch
from graphport.model_def.huggingface_values import Values, read_flag
from graphport.model_def.huggingface_windows import WindowRule
from graphport.model_def.rotary_parameters import RotaryRule

_GEMMA_NORM = NormConfig(unit_offset=True)
_GLM_EPSILON = 1.5625e-07
_GLM_ROTARY = RotaryRule(partial_factor=0.5, reads_partial=True, interleaved=True)
_EXPERT_COUNTS = ("num_experts", "num_local_experts")  # the hub's, and transformers 5's
_GROUPS = ("n_group", "topk_group")
_DEEPSEEK_EXPERTS = ExpertRule(
    count_keys=("n_routed_experts", *_EXPERT_COUNTS),
    width_key="moe_intermediate_size",
    normalized=False,
    first_key=("first_k_dense_replace", 0),
    shared_count_key="n_shared_experts",
    scaling=("routed_scaling_factor", 1.0),
)
# transformers computes both sizes from the parts of a head; the rest trains or places experts
_DEEPSEEK_IGNORED = ("head_dim", "qk_head_dim", "auto_map", "aux_loss_alpha", "seq_aux", "ep_size")
_BIAS, _MLP_BIAS = Flag("attention_bias"), Flag("mlp_bias")


def _gemma(family: DecoderFamily, values: Values) -> DecoderFamily:
    if values.get("hidden_activation") is None:
        return family
    return dataclasses.replace(family, keys=keys_of(activation="hidden_activation"))


def _deepseek_v2(family: DecoderFamily, values: Values) -> DecoderFamily:
    family = _with_query_rank(family, values)
    match values.get("topk_method"):
        case None | "greedy":
            return family
        case "group_limited_greedy":
            ignored = tuple(key for key in family.ignored if key not in _GROUPS)
            experts = dataclasses.replace(_DEEPSEEK_EXPERTS, group_keys=_GROUPS)
            return dataclasses.replace(family, experts=experts, ignored=ignored)
        case other:
            raise CheckpointError(
                f"config.json: topk_method {other!r} is not read; known are greedy and group_limited_greedy"
            )


def _deepseek_v3(family: DecoderFamily, values: Values) -> DecoderFamily:
    rotary = RotaryRule(interleaved=read_flag(values, "rope_interleave", default=True))
    return dataclasses.replace(_with_query_rank(family, values), rotary=rotary)


def _gpt_oss(family: DecoderFamily, values: Values) -> DecoderFamily:
    quantised = values.get("quantization_config")
    if quantised is not None and not (isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4"):
        raise CheckpointError(
            f"config.json: quantization_config {quantised!r:.80} of gpt_oss is not read; known is quant_method mxfp4"
        )
    if values.get("rope_scaling") is None and values.get("rope_parameters") is None:
        raise CheckpointError(
            "config.json: gpt_oss needs rope_scaling or rope_parameters: transformers would take a YaRN of its own "
            "where both are absent; state it"
        )
    return family


def _with_query_rank(family: DecoderFamily, values: Values) -> DecoderFamily:
    has_rank = values.get("q_lora_rank") is not None
    return dataclasses.replace(family, tensors=decoder_tensors.DEEPSEEK_LATENT_QUERY) if has_rank else family


RMS_DECODERS: tuple[DecoderFamily, ...] = (
    DecoderFamily(
        model_type="llama", kv_heads_default=True, qkv_bias=_BIAS, output_bias=_BIAS, feed_forward_bias=_MLP_BIAS
    ),
    DecoderFamily(model_type="mistral", window=WindowRule(default=4096)),
    DecoderFamily(
        model_type="qwen2",
        qkv_bias=True,
        window=WindowRule(default=4096, needs_flag=True, first_key="max_window_layers"),
    ),
    DecoderFamily(
        model_type="qwen3",
        head_dim=128,
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm_over="head",
        window=WindowRule(default=4096, needs_flag=True, first_key="max_window_layers"),
    ),
    DecoderFamily(
        model_type="mixtral",
        tensors=decoder_tensors.MIXTRAL_EXPERTS,
        epsilon=1e-5,
        rotary=RotaryRule(theta=1_000_000.0),
        window=WindowRule(),
        experts=ExpertRule(count_keys=("num_local_experts",)),
    ),
    DecoderFamily(
        model_type="qwen2_moe",
        tensors=decoder_tensors.QWEN_EXPERTS,
        qkv_bias=Flag("qkv_bias", default=True),
        window=WindowRule(default=4096, needs_flag=True),
        ignored=("max_window_layers",),
        experts=ExpertRule(
            count_keys=_EXPERT_COUNTS,
            width_key="moe_intermediate_size",
            normalized=Switch("norm_topk_prob", default=False),
            shared_width_key="shared_expert_intermediate_size",
            step_key="decoder_sparse_step",
            dense_layers_key="mlp_only_layers",
        ),
    ),
    DecoderFamily(
        model_type="qwen3_moe",
        tensors=decoder_tensors.QWEN_EXPERTS,
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm_over="head",
        window=WindowRule(default=4096, needs_flag=True),
        ignored=("max_window_layers",),
        experts=ExpertRule(
            count_keys=_EXPERT_COUNTS,
            width_key="moe_intermediate_size",
            normalized=Switch("norm_topk_prob", default=False),
            step_key="decoder_sparse_step",
            dense_layers_key="mlp_only_layers",
        ),
    ),
    DecoderFamily(
        model_type="deepseek_v2",
        tensors=decoder_tensors.DEEPSEEK_QUERY,
        keys=keys_of("head_dim"),
        kv_heads_default=True,
        refine=_deepseek_v2,
        refined_by=("topk_method",),
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        rotary=RotaryRule(interleaved=True),
        has_latent=True,
        experts=_DEEPSEEK_EXPERTS,
        neutral={"norm_topk_prob": (None, False), "scoring_func": ("softmax",), "moe_layer_freq": (1,)},
        ignored=("n_group", "topk_group", *_DEEPSEEK_IGNORED),
    ),
    DecoderFamily(
        model_type="deepseek_v3",
        tensors=decoder_tensors.DEEPSEEK_QUERY,
        keys=keys_of("head_dim"),
        kv_heads_default=True,
        refine=_deepseek_v3,
        refined_by=("rope_interleave",),
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        rotary=RotaryRule(interleaved=True),
        has_latent=True,
        experts=dataclasses.replace(
            _DEEPSEEK_EXPERTS,
            normalized=Switch("norm_topk_prob", default=True),
            first_key=("first_k_dense_replace", 3),
            router=RouterConfig(scores="sigmoid", correction=True, group_best=2),
            group_keys=_GROUPS,
            scaling=("routed_scaling_factor", 2.5),
        ),
        neutral={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "moe_layer_freq": (1,)},
        ignored=("num_nextn_predict_layers", "num_mtp_layers", *_DEEPSEEK_IGNORED),
    ),
    DecoderFamily(
        model_type="gpt_oss",
        tensors=decoder_tensors.GPT_OSS_SINKS,
        epsilon=1e-5,
        head_dim=64,
        refine=_gpt_oss,
        refined_by=("quantization_config",),
        qkv_bias=Flag("attention_bias", default=True),
        output_bias=Flag("attention_bias", default=True),
        rotary=RotaryRule(theta=150_000.0),
        window=WindowRule(default=128, period=2),
        sinks=True,
        experts=ExpertRule(
            count_keys=("num_local_experts", "num_experts"),
            bias=True,
            router_bias=True,
            alpha=("swiglu_alpha", 1.702),
            limit=("swiglu_limit", 7.0),
            up_offset=1.0,
        ),
        ignored=("initial_context_length", "experts_per_token"),  # transformers reads neither
    ),
    DecoderFamily(
        model_type="smollm3",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        feed_forward_bias=_MLP_BIAS,
        rotary=RotaryRule(theta=2_000_000.0, flags_key="no_rope_layers", flags_interval_key="no_rope_layer_interval"),
        window=WindowRule(needs_flag=True),
        ignored=("max_window_layers",),
    ),
    DecoderFamily(
        model_type="granite",
        kv_heads_default=True,
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        feed_forward_bias=_MLP_BIAS,
        attention_scale=Number("attention_multiplier", 1.0),
        residual_scale=Number("residual_multiplier", 1.0),
        embedding_scale=Number("embedding_multiplier", 1.0),
        logit_scale=Number("logits_scaling", 1.0, power=-1.0),
    ),
    DecoderFamily(
        model_type="olmo2",
        tensors=decoder_tensors.OLMO2,
        kv_heads_default=True,
        epsilon=1e-5,
        norm_order="output",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm_over="width",
    ),
    DecoderFamily(
        model_type="olmo3",
        tensors=decoder_tensors.OLMO2,
        kv_heads_default=True,
        epsilon=1e-5,
        norm_order="output",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm_over="width",
        rotary=RotaryRule(theta=500_000.0, local_theta=500_000.0),
        window=WindowRule(default=4096, period=4),
    ),
    DecoderFamily(
        model_type="gemma",
        head_dim=256,
        activation="gelu_pytorch_tanh",
        norm=_GEMMA_NORM,
        refine=_gemma,
        refined_by=("hidden_act", "hidden_activation"),
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        embedding_scale=Number("hidden_size", power=0.5),
        neutral={"use_bidirectional_attention": (None, False)},
    ),
    DecoderFamily(
        model_type="gemma2",
        tensors=decoder_tensors.GEMMA_SANDWICH,
        keys=keys_of(activation="hidden_activation"),
        head_dim=256,
        activation="gelu_pytorch_tanh",
        norm=_GEMMA_NORM,
        norm_order="sandwich",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        window=WindowRule(default=4096, period=2),
        attention_scale=Number("query_pre_attn_scalar", 256.0, power=-0.5),
        attention_softcap=Number("attn_logit_softcapping", 50.0),
        logit_softcap=Number("final_logit_softcapping", 30.0),
        embedding_scale=Number("hidden_size", power=0.5),
        neutral={"use_bidirectional_attention": (None, False)},
        ignored=("hidden_act", "cache_implementation", "sliding_window_size"),
    ),
    DecoderFamily(
        model_type="gemma3_text",
        tensors=decoder_tensors.GEMMA_SANDWICH,
        keys=keys_of(activation="hidden_activation"),
        head_dim=256,
        activation="gelu_pytorch_tanh",
        norm=_GEMMA_NORM,
        norm_order="sandwich",
        qkv_bias=_BIAS,
        output_bias=_BIAS,
        qk_norm_over="head",
        rotary=RotaryRule(theta=1_000_000.0, local_theta=10_000.0, local_theta_key="rope_local_base_freq"),
        window=WindowRule(default=4096, period=6, period_key="sliding_window_pattern"),
        attention_scale=Number("query_pre_attn_scalar", 256.0, power=-0.5),
        logit_softcap=Number("final_logit_softcapping"),
        embedding_scale=Number("hidden_size", power=0.5),
        neutral={
            "use_bidirectional_attention": (None, False),
            "attn_logit_softcapping": (None,),  # transformers reads it and never applies it
        },
        ignored=("hidden_act", "cache_implementation", "_sliding_window_pattern"),
    ),
    DecoderFamily(
        model_type="phi3",
        tensors=decoder_tensors.PHI3,
        kv_heads_default=True,
        epsilon=1e-5,
        rotary=RotaryRule(reads_partial=True, type_aliases={"su": "longrope", "yarn": "longrope"}),
        window=WindowRule(),
        ignored=("auto_map",),  # the code of the hub's folder, which transformers has too
    ),
    DecoderFamily(
        model_type="seed_oss",
        head_dim=128,
        qkv_bias=Flag("attention_bias", default=True),
        output_bias=Flag("attention_out_bias"),
        feed_forward_bias=_MLP_BIAS,
        ignored=("residual_dropout",),
    ),
    DecoderFamily(
        model_type="helium",
        epsilon=1e-8,
        head_dim=128,
        qkv_bias=_BIAS,
        feed_forward_bias=_MLP_BIAS,
        rotary=RotaryRule(theta=100_000.0, interleaved=True),
    ),
    DecoderFamily(
        model_type="glm",
        tensors=decoder_tensors.GLM,
        epsilon=_GLM_EPSILON,
        head_dim=128,
        qkv_bias=Flag("attention_bias", default=True),
        rotary=_GLM_ROTARY,
    ),
    DecoderFamily(
        model_type="glm4",
        tensors=decoder_tensors.GLM4,
        epsilon=_GLM_EPSILON,
        head_dim=128,
        norm_order="sandwich",
        qkv_bias=Flag("attention_bias", default=True),
        rotary=_GLM_ROTARY,
    ),
)
