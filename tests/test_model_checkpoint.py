"""Whole checkpoints: which source is read how, end ids, tokenizer and chat template."""

import io
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, make_model, save_folder
from tokenizers import Tokenizer, models

from graphport.model_def import checkpoint as checkpoint_module
from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.transformer import parameter_shapes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("saved"), make_model("llama"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def test_a_checkpoint_holds_every_parameter_in_our_names_as_float32(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    assert {name: tuple(weight.shape) for name, weight in checkpoint.weights.items()} == parameter_shapes(
        checkpoint.config
    )
    assert {weight.dtype for weight in checkpoint.weights.values()} == {torch.float32}
    assert checkpoint.source["format"] == "huggingface"
    assert checkpoint.source["name"] == "model"
    assert len(checkpoint.source["sha256"]) == 64


def test_the_source_hash_changes_with_the_weights(folder: Path) -> None:
    before = load_checkpoint(folder).source["sha256"]
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors")
    assert load_checkpoint(folder).source["sha256"] != before


def test_a_file_that_is_overwritten_later_changes_no_loaded_weight(folder: Path) -> None:
    weights = load_checkpoint(folder).weights
    before = weights["head.weight"].clone()
    path = folder / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.seek(size // 8)
        stream.write(b"\0" * (size - size // 8))
    assert torch.equal(weights["head.weight"], before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "absent", r"nothing is there, and it is no hub id; needed is a Hugging Face folder"),
        (lambda path: str(path / "absent.gguf"), r"absent\.gguf'.*nothing is there"),
        (lambda _path: "no/such/model", r"no model at 'no/such/model'"),
        (lambda path: path, r"has no config\.json; a Hugging Face folder needs it"),
        (lambda path: path / "weights.safetensors", r"holds weights only; give the folder"),
        (lambda path: path / "notes.txt", r"is a file that is not read \(\.txt\); needed is"),
    ],
)
def test_anything_that_is_no_model_is_refused_with_what_is_accepted(make: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(make(tmp_path))


def test_an_adapter_is_refused_with_how_to_merge_it(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is an adapter .*merge_and_unload"):
        load_checkpoint(folder)


def test_a_torn_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(CheckpointError, match=r"config\.json is no JSON"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, got list"):
        load_checkpoint(folder)


def test_a_hub_id_is_fetched_without_pickles_and_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def fetch(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked[hub_id] = allow_patterns
        return str(folder)

    monkeypatch.setattr(checkpoint_module, "snapshot_download", fetch)
    assert load_checkpoint("some-owner/tiny.llama-2").source["name"] == "some-owner/tiny.llama-2"
    (patterns,) = asked.values()
    assert set(patterns) == {"*.json", "*.safetensors", "*.jinja", "tokenizer.model"}


def test_a_hub_id_without_a_network_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(hub_id: str, *, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder\nand more")

    monkeypatch.setattr(checkpoint_module, "snapshot_download", fetch)
    with pytest.raises(
        CheckpointError, match=r"could not be fetched: Cannot find an appropriate.*folder; check"
    ) as error:
        load_checkpoint("owner/name")
    assert "\n" not in str(error.value)


def test_a_folder_of_the_hub_cache_may_link_to_its_blobs(saved: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    shutil.copytree(saved, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    assert load_checkpoint(snapshot).config.num_layers == 2


def _write_tokenizer(folder: Path) -> str:
    words = ["<unk>", "<s>", "</s>", "<|end|>", *(f"w{number}" for number in range(57))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return (folder / "tokenizer.json").read_text()


_END_FORMS: list[Any] = [None, 7, [8, 9]]


@pytest.mark.parametrize(
    ("generation", "config", "text"), list(itertools.product(_END_FORMS, _END_FORMS, [None, "<|end|>"]))
)
def test_b105_end_ids_are_the_union_of_three_files(
    generation: Any, config: Any, text: str | None, folder: Path
) -> None:
    _write_tokenizer(folder)
    config = config + 10 if isinstance(config, int) else config
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        edit_json(folder / "generation_config.json", lambda values: values.update(eos_token_id=generation))
    edit_json(folder / "config.json", lambda values: values.update(eos_token_id=config))
    if text is not None:
        edit_json(folder / "tokenizer_config.json", lambda values: values.update(eos_token=text))
    wanted: set[int] = {3} if text else set()
    for value in (generation, config):
        wanted |= set(value) if isinstance(value, list) else {value} - {None}
    ids = load_checkpoint(folder).generation.eos_token_ids
    assert set(ids) == wanted
    assert len(ids) == len(wanted)


@pytest.mark.parametrize(
    ("tokenizer_config", "expected"),
    [
        ({"eos_token": {"content": "<|end|>", "special": True}}, (2, 3)),
        ({"eos_token": "w5"}, (2, 9)),
        ({"eos_token": "</s>", "added_tokens_decoder": {"11": {"content": "</s>"}}}, (2, 11)),
        ({"eos_token": None}, (2,)),
    ],
)
def test_b105_the_tokenizers_end_token_is_resolved_to_its_id(
    tokenizer_config: dict[str, Any], expected: tuple[int, ...], folder: Path
) -> None:
    _write_tokenizer(folder)
    edit_json(folder / "tokenizer_config.json", lambda values: values.update(tokenizer_config))
    assert load_checkpoint(folder).generation.eos_token_ids == expected


def test_b105_an_end_token_that_the_tokenizer_lacks_is_noted(folder: Path) -> None:
    _write_tokenizer(folder)
    edit_json(folder / "tokenizer_config.json", lambda values: values.update(eos_token="<gone>"))
    checkpoint = load_checkpoint(folder)
    assert checkpoint.generation.eos_token_ids == (2,)
    assert any("names eos_token '<gone>', which the tokenizer does not hold" in note for note in checkpoint.notes)


@pytest.mark.parametrize("value", [61, -1, "2", 2.0, True, [2, 99]])
def test_b105_an_end_id_outside_the_vocabulary_is_refused(value: Any, folder: Path) -> None:
    edit_json(folder / "config.json", lambda values: values.update(eos_token_id=value))
    with pytest.raises(CheckpointError, match=r"end-of-text id .* is no id of a vocabulary of 61"):
        load_checkpoint(folder)


def test_begin_and_padding_ids_come_from_the_first_file_that_has_them(folder: Path) -> None:
    edit_json(folder / "generation_config.json", lambda values: values.update(bos_token_id=4))
    edit_json(folder / "config.json", lambda values: values.update(bos_token_id=5, pad_token_id=-1))
    checkpoint = load_checkpoint(folder)
    assert checkpoint.generation.bos_token_id == 4
    assert checkpoint.generation.pad_token_id is None
    assert "pad_token_id -1 is no id of a vocabulary of 61; left out" in checkpoint.notes


def test_tokenizer_json_passes_through_as_it_is(folder: Path) -> None:
    text = _write_tokenizer(folder)
    assert load_checkpoint(folder).tokenizer_json == text


def test_a_torn_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no JSON"):
        load_checkpoint(folder)


def test_a_folder_without_tokenizer_has_none_and_says_so(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    assert checkpoint.tokenizer_json is None
    assert any("has no tokenizer.json" in note for note in checkpoint.notes)


def test_a_tokenizer_model_alone_is_converted(folder: Path, tmp_path: Path) -> None:
    model = io.BytesIO()
    lines = ["the quick brown fox", "jumps over the lazy dog", "and runs", "far away from here"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 5),
        model_writer=model,
        model_type="bpe",
        vocab_size=290,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    edit_json(folder / "tokenizer_config.json", lambda values: values.update(tokenizer_class="LlamaTokenizer"))
    checkpoint = load_checkpoint(folder)
    assert "tokenizer.json was made from tokenizer.model by transformers" in checkpoint.notes
    assert checkpoint.tokenizer_json is not None
    ids = Tokenizer.from_str(checkpoint.tokenizer_json).encode("the fox", add_special_tokens=False).ids
    assert ids == sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode("the fox")


def test_a_damaged_slow_tokenizer_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model could not be converted.*save_pretrained"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", "plain"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        (None, None),
    ],
)
def test_chat_template_of_tokenizer_config(template: Any, expected: str | None, folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", lambda values: values.update(chat_template=template))
    assert load_checkpoint(folder).chat_template == expected


def test_chat_template_file_wins(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", lambda values: values.update(chat_template="old"))
    (folder / "chat_template.jinja").write_text("{{ new }}\n")
    assert load_checkpoint(folder).chat_template == "{{ new }}\n"


@pytest.mark.parametrize("template", [[{"name": "tool_use", "template": "t"}], [1], 7])
def test_chat_templates_without_a_default_are_refused(template: Any, folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", lambda values: values.update(chat_template=template))
    with pytest.raises(CheckpointError, match="chat_template must be a text or a list of named texts"):
        load_checkpoint(folder)
