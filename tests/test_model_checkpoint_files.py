"""Weight files: shards and their index, damaged files, pickles; refused by name before any weight is read."""

import json
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from parity import RELATIVE_TOLERANCES
from tiny_checkpoints import edit_json, make_model, relative_difference, save_folder, token_ids

from graphport.model_def.checkpoint import CheckpointError, load_checkpoint

TOLERANCE = RELATIVE_TOLERANCES["checkpoint", "float32"]

_INDEX = "model.safetensors.index.json"


_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234567\n"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("saved"), make_model("llama"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_folder(tmp_path_factory.mktemp("sharded"), make_model("llama"), max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "model")


def _shard_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_b76_shards_by_their_index_equal_the_model(shards: Path) -> None:
    checkpoint = load_checkpoint(shards)
    assert relative_difference(checkpoint, make_model("llama"), token_ids(12)) < TOLERANCE


def test_b76_missing_and_renamed_shards_are_listed_before_any_weight_is_read(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _shard_names(shards)
    (shards / names[0]).unlink()
    (shards / names[1]).rename(shards / "other.safetensors")
    monkeypatch.setattr("graphport.model_def.safetensors_files.as_float32", None)  # reading would call it
    with pytest.raises(CheckpointError, match=f"names files that are missing: {names[0]}, {names[1]}$"):
        load_checkpoint(shards)


def test_b76_an_index_that_names_only_some_shards_lacks_their_tensors(shards: Path) -> None:
    lost = _shard_names(shards)[-1]

    def forget(index: dict[str, Any]) -> None:
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != lost}

    edit_json(shards / _INDEX, forget)
    with pytest.raises(CheckpointError, match=r"missing: |lm_head.weight is missing"):
        load_checkpoint(shards)


def test_b76_shards_without_an_index_are_read_together_and_noted(shards: Path) -> None:
    (shards / _INDEX).unlink()
    checkpoint = load_checkpoint(shards)
    assert relative_difference(checkpoint, make_model("llama"), token_ids(12)) < TOLERANCE
    assert any("read together: model-00001-of-" in note for note in checkpoint.notes)


def test_b76_shards_without_an_index_must_be_complete_by_their_numbers(shards: Path) -> None:
    names = _shard_names(shards)
    (shards / _INDEX).unlink()
    (shards / names[1]).unlink()
    with pytest.raises(CheckpointError, match=f"belongs to {len(names)} files; missing: {names[1]}"):
        load_checkpoint(shards)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", "a\\b", ""])
def test_b76_an_index_may_not_name_a_file_outside_its_folder(name: str, shards: Path) -> None:
    edit_json(shards / _INDEX, lambda index: index["weight_map"].update({"lm_head.weight": name}))
    with pytest.raises(CheckpointError, match="names a file outside its folder"):
        load_checkpoint(shards)


def test_b76_a_shard_may_not_be_a_link_that_leaves_the_folder(shards: Path) -> None:
    shard = shards / _shard_names(shards)[0]
    outside = shard.rename(shards.parent / "outside.safetensors")
    shard.symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{shard.name} is a link that leaves its folder"):
        load_checkpoint(shards)


def test_b76_an_index_that_disagrees_with_a_shard_is_refused(shards: Path) -> None:
    first, second = _shard_names(shards)[:2]

    def swap(index: dict[str, Any]) -> None:
        moved = next(name for name, file in index["weight_map"].items() if file == first)
        index["weight_map"][moved] = second

    edit_json(shards / _INDEX, swap)
    with pytest.raises(CheckpointError, match=f"{_INDEX} and {first} disagree: the file also has model"):
        load_checkpoint(shards)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[]"])
def test_b76_an_index_without_a_weight_map_is_refused(text: str, shards: Path) -> None:
    (shards / _INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json.*weight_map"):
        load_checkpoint(shards)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"is in a\.safetensors and in b\.safetensors"):
        load_checkpoint(folder)


def test_safetensors_beside_the_ones_that_count_are_noted(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert "safetensors files that were not read: consolidated.safetensors" in load_checkpoint(folder).notes


_DAMAGES = {
    "a byte short": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "eight bytes": lambda data: data[:8],
    "empty": lambda _data: b"",
    "junk appended": lambda data: data + b"junk",
    "flipped header length": lambda data: bytes([data[0] ^ 0xFF, *data[1:7], 0x7F]) + data[8:],
    "lfs pointer": lambda _data: _LFS,
}


@pytest.mark.parametrize("damage", _DAMAGES)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_b77_a_damaged_file_is_refused_by_name_before_any_weight_is_read(
    damage: str, is_sharded: bool, folder: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = shutil.copytree(sharded, tmp_path / "shards") if is_sharded else folder
    victim = where / _shard_names(where)[-1]
    victim.write_bytes(_DAMAGES[damage](victim.read_bytes()))
    monkeypatch.setattr("graphport.model_def.safetensors_files.as_float32", None)  # reading would call it
    reason = "Git LFS pointer" if damage == "lfs pointer" else "not a whole safetensors file"
    with pytest.raises(CheckpointError, match=f"{victim.name} is not a whole safetensors file.*") as error:
        load_checkpoint(where)
    assert reason in str(error.value)


def test_b77_a_header_that_promises_more_than_the_file_says_so(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 10**6) + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="its header claims 1000000 bytes and the file has"):
        load_checkpoint(folder)


class _Touch:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_b79_the_trap_works_when_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(_Touch(tmp_path / "pwned")))
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "consolidated.00.pth"])
def test_b79_pickled_weights_are_refused_unopened_with_how_to_convert(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Touch(tmp_path / "pwned")))
    with pytest.raises(CheckpointError, match=rf"pickled weights only \({name}\).*save_pretrained"):
        load_checkpoint(folder)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("index", ["pytorch_model.bin.index.json", _INDEX])
def test_b79_a_pickle_in_a_sharded_index_is_refused_unopened(index: str, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model-00001-of-00001.bin").write_bytes(pickle.dumps(_Touch(tmp_path / "pwned")))
    weight_map = {"lm_head.weight": "pytorch_model-00001-of-00001.bin"}
    (folder / index).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        CheckpointError, match=r"pytorch_model-00001-of-00001\.bin.*(save_pretrained|only \.safetensors)"
    ):
        load_checkpoint(folder)
    assert not (tmp_path / "pwned").exists()


def test_b79_safetensors_are_preferred_to_a_pickle_beside_them(folder: Path, tmp_path: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Touch(tmp_path / "pwned")))
    assert "pickled files were not opened: pytorch_model.bin" in load_checkpoint(folder).notes
    assert not (tmp_path / "pwned").exists()
