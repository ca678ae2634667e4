"""Encoders that score labels: checkpoints against transformers, through bundles to `classify`; what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import RELATIVE_TOLERANCES, assert_parity
from tiny_checkpoints import edit_json
from tiny_encoders import CONFIGS, SIZES, randomise, word_piece
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from graphport.cli_serve import _is_encoder
from graphport.export import export
from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.huggingface_heads import SEQUENCE_HEADS
from graphport.model_def.position_config import ConfigError
from graphport.model_def.readout_config import ClassifierConfig
from graphport.model_def.transformer import Transformer
from graphport.runtime import Encoder, load_encoder

IDS = [[5, 7, 9], [8], list(range(3, 30)), [4] * 12]
LABELS = {0: "no", 1: "maybe", 2: "yes"}
AUTO = {"text": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}


def make_classifier(model_type: str, kind: str, **changes: Any) -> Any:
    config_class, fixed = CONFIGS[model_type]
    sizes = {key: value for key, value in SIZES.items() if key in config_class().to_dict()}
    config = config_class(**(sizes | fixed | {"id2label": LABELS} | changes))
    config._attn_implementation = "eager"
    return randomise(AUTO[kind].from_config(config).eval())


def reference_logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("kind", sorted(AUTO))
@pytest.mark.parametrize("model_type", sorted((*SEQUENCE_HEADS, "modernbert")))
def test_a_checkpoint_scores_as_transformers_does(model_type: str, kind: str, tmp_path: Path) -> None:
    model = make_classifier(model_type, kind)
    model.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config.classifier is not None
    assert checkpoint.config.classifier.labels == ("no", "maybe", "yes")
    ours = Transformer(checkpoint.config).eval()
    ours.load_state_dict(checkpoint.weights, strict=True)
    with torch.inference_mode():
        assert ours.classifier is not None
        lengths = torch.tensor([len(IDS[2])], dtype=torch.int32)
        found = ours.classifier(ours(torch.tensor([IDS[2]])), lengths)[0].numpy()
    wanted = reference_logits(model, IDS[2])
    limit = RELATIVE_TOLERANCES["checkpoint", "float32"] * np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= limit
    assert np.abs(found[..., [1, 0, 2]] - wanted).max() > limit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classifiers")


def _bundle(folder: Path, name: str, model: Any, **options: Any) -> Encoder:
    model.save_pretrained(folder / name)
    word_piece().save(str(folder / name / "tokenizer.json"))
    bundle = export(folder / name, folder / f"{name}.bundle", **({"precision": "fp32"} | options))
    assert all(check.passed for check in bundle.certificate)
    return load_encoder(bundle.path, threads=1)


def _softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(-1).numpy()


def test_texts_are_classified_in_their_order_and_whatever_their_neighbours(folder: Path) -> None:
    model = make_classifier("bert", "text")
    with _bundle(folder, "text", model) as encoder:
        assert encoder.labels == ("no", "maybe", "yes")
        found = encoder.classify(IDS)
        for ids, scores in zip(IDS, found, strict=True):
            assert scores.dtype == np.float32
            assert_parity(scores, _softmax(reference_logits(model, ids)), "compiled")
        for ids, scores in zip(IDS, found, strict=True):
            assert_parity(encoder.classify([ids])[0], scores, "reused cache")
        assert encoder.classify(["a text"])[0].shape == (3,)
        assert encoder.classify([]) == []
        with pytest.raises(ValueError, match="no pooling, so no vector a text; use classify"):
            encoder.encode(IDS)
    with pytest.raises(ValueError, match="is a classifier, for which there is no route; serve decoders"):
        _is_encoder(folder / "text.bundle", None)


def test_tokens_are_classified_one_by_one(folder: Path) -> None:
    model = make_classifier("distilbert", "token")
    with _bundle(folder, "token", model) as encoder:
        for ids, scores in zip(IDS, encoder.classify(IDS), strict=True):
            assert scores.shape == (len(ids), 3)
            assert_parity(scores, _softmax(reference_logits(model, ids)), "compiled")


def test_a_classifier_of_the_mean_reads_real_tokens_alone(folder: Path) -> None:
    model = make_classifier("modernbert", "text", classifier_pooling="mean", norm_bias=True, classifier_bias=True)
    with _bundle(folder, "mean", model) as encoder:
        for ids, scores in zip(IDS, encoder.classify(IDS), strict=True):
            assert_parity(scores, _softmax(reference_logits(model, ids)), "compiled")


def test_labels_that_do_not_exclude_each_other_and_single_scores(folder: Path) -> None:
    several = make_classifier("roberta", "text", problem_type="multi_label_classification")
    with _bundle(folder, "several", several, verify=False) as encoder:
        wanted = torch.from_numpy(reference_logits(several, IDS[0])).sigmoid().numpy()
        assert_parity(encoder.classify(IDS[:1])[0], wanted, "compiled")
    single = make_classifier("bert", "text", id2label={0: "score"})
    with _bundle(folder, "single", single, verify=False) as encoder:
        assert_parity(encoder.classify(IDS[:1])[0], reference_logits(single, IDS[0]), "compiled")


def test_an_int8_classifier_stays_close(folder: Path) -> None:
    model = make_classifier("bert", "text")
    with _bundle(folder, "int8", model, precision="int8") as encoder:
        for ids, scores in zip(IDS, encoder.classify(IDS), strict=True):
            assert int(scores.argmax()) == int(reference_logits(model, ids).argmax())


def test_what_is_no_classifier_is_refused(folder: Path, tmp_path: Path) -> None:
    make_classifier("modernbert", "text").save_pretrained(tmp_path / "modernbert")
    edit_json(tmp_path / "modernbert/config.json", lambda values: values.update(classifier_pooling="max"))
    with pytest.raises(CheckpointError, match="classifier_pooling must be cls or mean, got 'max'"):
        load_checkpoint(tmp_path / "modernbert")
    make_classifier("bert", "text").save_pretrained(tmp_path / "bert")
    edit_json(tmp_path / "bert/config.json", lambda values: values.update(id2label={"1": "a"}))
    with pytest.raises(CheckpointError, match=r"id2label must name the labels 0, 1, .*got \{'1': 'a'\}"):
        load_checkpoint(tmp_path / "bert")
    edit_json(tmp_path / "bert/config.json", lambda values: values.update(architectures=1))
    with pytest.raises(CheckpointError, match="architectures must be a list of class names, got 1"):
        load_checkpoint(tmp_path / "bert")
    with pytest.raises(ConfigError, match="a classifier's norm reads its dense layer; give transform"):
        ClassifierConfig(labels=("a",), epsilon=1e-5)
    with pytest.raises(ConfigError, match="a classifier needs at least one label"):
        ClassifierConfig(labels=())


def test_an_embedding_model_classifies_nothing(folder: Path, tmp_path: Path) -> None:
    from tiny_encoders import make_encoder

    with (
        _bundle(tmp_path, "plain", make_encoder("bert"), verify=False) as encoder,
        pytest.raises(ValueError, match="no classifier; use encode"),
    ):
        encoder.classify(IDS)
