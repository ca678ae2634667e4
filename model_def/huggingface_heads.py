"""The heads of Hugging Face encoders that score: which architectures have one, and the names of its tensors.

In: a parsed config.json. Out: a `ClassifierConfig` or `MaskedHeadConfig` and our parameter names to the checkpoint's,
or nothing for an architecture without either (its heads are left out, see `encoder_tensors.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.config import TransformerConfig
from graphport.model_def.huggingface_values import Values, read_activation, read_architectures, read_flag
from graphport.model_def.readout_config import ClassifierConfig, MaskedHeadConfig, Transform

_SEQUENCE, _TOKEN, _MASKED = "ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceHead:
    """How a family scores a text: the transform and the tensors' modules (`dense` with the family's prefix or not)."""

    transform: Transform
    dense: str
    output: str


_DENSE, _OUT = "classifier.dense", "classifier.out_proj"
SEQUENCE_HEADS: Mapping[str, SequenceHead] = {
    "bert": SequenceHead(transform="tanh", dense="bert.pooler.dense", output="classifier"),
    "roberta": SequenceHead(transform="tanh", dense=_DENSE, output=_OUT),
    "xlm-roberta": SequenceHead(transform="tanh", dense=_DENSE, output=_OUT),
    "camembert": SequenceHead(transform="tanh", dense=_DENSE, output=_OUT),
    "mpnet": SequenceHead(transform="tanh", dense=_DENSE, output=_OUT),
    "electra": SequenceHead(transform="gelu", dense=_DENSE, output=_OUT),
    "distilbert": SequenceHead(transform="relu", dense="pre_classifier", output="classifier"),
}


def read_classifier(values: Values) -> tuple[ClassifierConfig, dict[str, str]] | None:
    """The classifier that `architectures` names and the stored names of its parameters; None without one.

    Raises CheckpointError for labels that are not numbered from 0.
    """
    model_type = str(values.get("model_type"))
    names = read_architectures(values)
    kind = next((kind for kind in (_SEQUENCE, _TOKEN) if any(name.endswith(kind) for name in names)), None)
    if kind is None:
        return None
    if model_type == "modernbert":
        return _modernbert_classifier(values, per_token=kind == _TOKEN)
    multi_label = values.get("problem_type") == "multi_label_classification"
    head = SEQUENCE_HEADS[model_type]
    if kind == _TOKEN:
        config = ClassifierConfig(labels=read_labels(values), per_token=True, multi_label=multi_label)
        return config, _parameters("classifier.output", "classifier")
    config = ClassifierConfig(labels=read_labels(values), transform=head.transform, multi_label=multi_label)
    return config, {**_parameters("classifier.dense", head.dense), **_parameters("classifier.output", head.output)}


def _modernbert_classifier(values: Values, *, per_token: bool) -> tuple[ClassifierConfig, dict[str, str]]:
    """Dense layer, activation and norm before the labels, of each token, the first, or the mean of all."""
    pooling = values.get("classifier_pooling") or "cls"
    if pooling not in ("cls", "mean"):
        raise CheckpointError(f"config.json: classifier_pooling must be cls or mean, got {pooling!r}")
    has_bias, norm_bias = read_flag(values, "classifier_bias"), read_flag(values, "norm_bias")
    config = ClassifierConfig(
        labels=read_labels(values),
        per_token=per_token,
        transform=_transform(values, "classifier_activation"),
        multi_label=values.get("problem_type") == "multi_label_classification",
        pooling="mean" if pooling == "mean" else "cls",
        dense_bias=has_bias,
        epsilon=float(values.get("norm_eps") or 1e-5),
        norm_bias=norm_bias,
    )
    dense, norm = _parameters("classifier.dense", "head.dense"), _parameters("classifier.norm", "head.norm")
    return config, {**dense, **norm, **_parameters("classifier.output", "classifier")}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMaskedHead:
    """The modules of a family's masked head; `activation`: the key of its name, None: gelu; `epsilon`: likewise.

    `output` has the bias, and the matrix too where no module of its own does.
    """

    dense: str
    norm: str
    output: str
    activation: str | None = None
    epsilon: str | None = "layer_norm_eps"

    @property
    def decoder(self) -> str:
        """The module of the matrix over the vocabulary, with a bias of its own where they are not tied."""
        return {"cls.predictions": "cls.predictions.decoder", "lm_head": "lm_head.decoder"}.get(
            self.output, self.output
        )


_LM_HEAD = StoredMaskedHead(dense="lm_head.dense", norm="lm_head.layer_norm", output="lm_head")
MASKED_HEADS: Mapping[str, StoredMaskedHead] = {
    "bert": StoredMaskedHead(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        output="cls.predictions",
        activation="hidden_act",
    ),
    "roberta": _LM_HEAD,
    "xlm-roberta": _LM_HEAD,
    "camembert": _LM_HEAD,
    "mpnet": _LM_HEAD,
    "distilbert": StoredMaskedHead(
        dense="vocab_transform",
        norm="vocab_layer_norm",
        output="vocab_projector",
        activation="activation",
        epsilon=None,
    ),
    "electra": StoredMaskedHead(
        dense="generator_predictions.dense", norm="generator_predictions.LayerNorm", output="generator_lm_head"
    ),
    "modernbert": StoredMaskedHead(
        dense="head.dense",
        norm="head.norm",
        output="decoder",
        activation="classifier_activation",
        epsilon="norm_eps",
    ),
}


def read_masked_head(
    values: Values, config: TransformerConfig, mask_id: int | None
) -> tuple[MaskedHeadConfig, dict[str, str]] | None:
    """The masked head that `architectures` names and the stored names of its parameters; None without one.

    The output's are found among the tensors, by `find_masked_output`.
    """
    model_type = str(values.get("model_type"))
    if not any(name.endswith(_MASKED) for name in read_architectures(values)):
        return None
    stored = MASKED_HEADS[model_type]
    is_modern = model_type == "modernbert"
    head = MaskedHeadConfig(
        width=config.embedding_width or config.hidden_size,
        transform=_transform(values, stored.activation) if stored.activation else "gelu",
        epsilon=float((values.get(stored.epsilon) if stored.epsilon else None) or (1e-5 if is_modern else 1e-12)),
        dense_bias=not is_modern or read_flag(values, "classifier_bias"),
        norm_bias=not is_modern or read_flag(values, "norm_bias"),
        output_bias=not is_modern or read_flag(values, "decoder_bias", default=True),
        tied=read_flag(values, "tie_word_embeddings", default=True),
        mask_id=mask_id,
    )
    dense, norm = _parameters("masked_head.dense", stored.dense), _parameters("masked_head.norm", stored.norm)
    return head, {**dense, **norm}


def _transform(values: Values, key: str) -> Transform:
    """A transform by an activation's name, gelu by default."""
    name = read_activation(key, values.get(key) or "gelu")
    if name == "quick_gelu":
        raise CheckpointError(f"config.json: {key} {name!r} is not read of a head")
    return name


def _parameters(ours: str, stored: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{stored}.{kind}" for kind in ("weight", "bias")}


def read_labels(values: Values) -> tuple[str, ...]:
    """The texts of `id2label` in the order of their numbers; transformers leaves it out for two without
    names.
    """
    named = values.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    if not isinstance(named, dict) or set(named) != {str(number) for number in range(len(named))}:
        raise CheckpointError(f"config.json: id2label must name the labels 0, 1, ...; got {named!r:.200}")
    return tuple(str(named[str(number)]) for number in range(len(named)))
