"""The classifiers of Hugging Face encoders: which architectures have one, and the names of its tensors.

In: a parsed config.json. Out: a `ClassifierConfig` and our parameter names to the checkpoint's, or nothing for an
architecture without labels (its heads are left out, see `encoder_tensors.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.huggingface_values import Values
from graphport.model_def.readout_config import ClassifierConfig, Transform

_SEQUENCE, _TOKEN = "ForSequenceClassification", "ForTokenClassification"


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

    Raises CheckpointError for a classifier that is not read, and for labels that are not numbered from 0.
    """
    model_type = str(values.get("model_type"))
    names = [str(name) for name in values.get("architectures") or ()]
    kind = next((kind for kind in (_SEQUENCE, _TOKEN) if any(name.endswith(kind) for name in names)), None)
    if kind is None:
        return None
    if model_type not in SEQUENCE_HEADS:
        raise CheckpointError(
            f"config.json: {', '.join(names)} is not read; classifiers are of {', '.join(SEQUENCE_HEADS)}. For "
            "embeddings, save the model without its head: AutoModel.from_pretrained(folder).save_pretrained(new_folder)"
        )
    multi_label = values.get("problem_type") == "multi_label_classification"
    head = SEQUENCE_HEADS[model_type]
    if kind == _TOKEN:
        config = ClassifierConfig(labels=read_labels(values), per_token=True, multi_label=multi_label)
        return config, _parameters("classifier.output", "classifier")
    config = ClassifierConfig(labels=read_labels(values), transform=head.transform, multi_label=multi_label)
    return config, {**_parameters("classifier.dense", head.dense), **_parameters("classifier.output", head.output)}


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
