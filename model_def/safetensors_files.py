"""The safetensors files of a Hugging Face folder: which they are, whether they are whole, what they hold.

In: a folder. Out: `WeightFiles`, an inventory checked before any weight is read, and the tensors themselves.
It knows no model: names are the checkpoint's. Pickled files are refused, never opened.
"""

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from graphport.model_def.checkpoint_record import CheckpointError, Shape, as_float32
from graphport.model_def.file_hashes import hash_file

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_TYPES = {**_FLOATS, "U8": torch.uint8}
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies (bytes from the file's start); `dtype` is safetensors' name (F16, BF16, F32, ...)."""

    file: Path
    dtype: str
    shape: Shape
    offset: int
    num_bytes: int

    def read(self) -> torch.Tensor:
        """The tensor in memory of its own, so that a file that changes later changes nothing."""
        data = np.fromfile(self.file, dtype=np.uint8, count=self.num_bytes, offset=self.offset)
        return torch.from_numpy(data).view(_TYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """Checked headers of one or several files; `tensors` by the checkpoint's names."""

    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...]

    def read(self, name: str) -> torch.Tensor:
        """The named tensor as float32; raises CheckpointError for values that are not finite."""
        tensor = self.tensors[name]
        return as_float32(f"{tensor.file.name}: {name}", tensor.read())

    def sha256(self) -> str:
        """SHA-256 of the file (several: of their hashes, one hex line each, in name order)."""
        hashes = [hash_file(file) for file in self.files]
        if len(hashes) == 1:
            return hashes[0]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def find_weight_files(folder: Path) -> WeightFiles:
    """Find and check the weight files of `folder`.

    Raises CheckpointError, naming the file, for a missing, damaged or foreign shard, an index that disagrees with its
    shards, and a folder that has only pickled weights.
    """
    names, index, notes = _choose(folder)
    files = tuple(folder / name for name in names)
    for file in files:
        _check_inside(folder, file)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        held = _inventory(file)
        if index is not None:
            _compare_with_index(folder, file, held, index)
        for name, tensor in held.items():
            if name in tensors:
                raise CheckpointError(f"{folder}: tensor {name} is in {tensors[name].file.name} and in {file.name}")
            tensors[name] = tensor
    return WeightFiles(files=files, tensors=tensors, notes=tuple(notes))


def _choose(folder: Path) -> tuple[list[str], dict[str, str] | None, list[str]]:
    """File names, the index's weight map when it is the one that counts, and notes."""
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)})
    notes = [f"pickled files were not opened: {', '.join(pickles)}"] if pickles else []
    index: dict[str, str] | None = None
    if SINGLE_FILE in present:
        names = [SINGLE_FILE]
    elif (folder / INDEX_FILE).is_file():
        index = _weight_map(folder / INDEX_FILE)
        names = sorted(set(index.values()))
        _check_names(folder / INDEX_FILE, names)
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(f"{folder}: {INDEX_FILE} names files that are missing: {', '.join(absent)}")
    elif present:
        names = present
        _check_complete(folder, names)
        notes.append(f"{SINGLE_FILE} and {INDEX_FILE} are absent; read together: {', '.join(names)}")
    elif pickles:
        raise CheckpointError(_pickle_refusal(folder, pickles))
    else:
        raise CheckpointError(
            f"{folder} has config.json and no weights: {SINGLE_FILE} or {INDEX_FILE} is needed (of a hub repository "
            "only safetensors are fetched; one with pickled weights alone must be converted first)"
        )
    if unread := [name for name in present if name not in names]:
        notes.append(f"safetensors files that were not read: {', '.join(unread)}")
    return names, index, notes


def _pickle_refusal(folder: Path, pickles: list[str]) -> str:
    return (
        f"{folder} has pickled weights only ({', '.join(pickles)}); unpickling can run code, so graphport never does. "
        "Convert them where you trust their origin: AutoModelForCausalLM.from_pretrained(folder)"
        ".save_pretrained(new_folder) of transformers writes safetensors"
    )


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no index with a weight_map: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names")
    return weight_map


def _check_names(index: Path, names: list[str]) -> None:
    for name in names:
        if not name or Path(name).name != name or "\\" in name or name in (".", ".."):
            raise CheckpointError(
                f"{index} names a file outside its folder: {name!r}; shards must lie beside the index"
            )
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r}; only .safetensors files are read")


def _check_complete(folder: Path, names: list[str]) -> None:
    for name in names:
        if match := _SHARD.fullmatch(name):
            stem, _, total = match.groups()
            wanted = [f"{stem}-{number:05d}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
            if absent := [each for each in wanted if each not in names]:
                raise CheckpointError(f"{folder}: {name} belongs to {int(total)} files; missing: {', '.join(absent)}")


def _check_inside(folder: Path, file: Path) -> None:
    """A link may not leave the folder; a hub cache's snapshot may point to its own blobs."""
    roots = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        roots.append(folder.resolve().parent.parent / "blobs")
    if not any(file.resolve().is_relative_to(root) for root in roots):
        raise CheckpointError(f"{file} is a link that leaves its folder, to {file.resolve()}; copy the file instead")


def _inventory(file: Path) -> dict[str, StoredTensor]:
    """The file's header, after safetensors has found the file whole."""
    try:
        with safe_open(file, framework="numpy"), file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a whole safetensors file: {_likely_reason(file)} ({error}); fetch it again"
        ) from error
    return {
        name: StoredTensor(
            file=file,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=8 + length + entry["data_offsets"][0],
            num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _likely_reason(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the weights; run `git lfs pull`"
    if size < 8:
        return f"it has {size} bytes"
    (header,) = struct.unpack("<Q", start[:8])
    if header > size - 8:
        return f"its header claims {header} bytes and the file has {size}: truncated or garbled"
    return f"its {size} bytes are not what the header describes: truncated, garbled or with junk appended"


def _compare_with_index(folder: Path, file: Path, held: dict[str, StoredTensor], index: dict[str, str]) -> None:
    promised = {name for name, shard in index.items() if shard == file.name}
    problems = []
    if absent := sorted(promised - set(held)):
        problems.append(f"the index promises {', '.join(absent)}")
    if extra := sorted(set(held) - promised):
        problems.append(f"the file also has {', '.join(extra)}")
    if problems:
        raise CheckpointError(f"{folder}: {INDEX_FILE} and {file.name} disagree: {'; '.join(problems)}")


def check_dtypes(folder: Path, tensors: dict[str, StoredTensor]) -> list[str]:
    """Notes on widened and narrowed dtypes; raises CheckpointError naming tensors that are no floats."""
    foreign = [f"{name} ({tensor.dtype})" for name, tensor in sorted(tensors.items()) if tensor.dtype not in _FLOATS]
    if foreign:
        raise CheckpointError(
            f"{folder}: weights of a type that is not read: {', '.join(foreign)}; "
            f"known are {', '.join(_FLOATS)} (quantised checkpoints must be dequantised first)"
        )
    notes = []
    for dtype in sorted({tensor.dtype for tensor in tensors.values()} - {"F32"}):
        change = "narrowed" if dtype == "F64" else "widened"
        notes.append(f"{dtype} weights were {change} to float32")
    return notes
