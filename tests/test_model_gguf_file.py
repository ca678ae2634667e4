"""The GGUF container: every block type, and damaged or foreign files refused before any work."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from tiny_checkpoints import (
    finish,
    make_model,
    write_gguf,
)

from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.gguf_file import read_gguf_file


def _random_blocks(kind: GGMLQuantizationType, rows: int) -> np.ndarray:
    """Bytes that decode to finite numbers: drawn anew, row by row, until they do."""
    generator = np.random.default_rng(int(kind))
    values, num_bytes = GGML_QUANT_SIZES[kind]
    kept: list[np.ndarray] = []
    while len(kept) < rows:
        row = generator.integers(0, 256, (1, 512 // values * num_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            decoded = dequantize(row, kind)
        if np.isfinite(decoded).all():
            kept.append(row)
    return np.concatenate(kept)


def _decodes(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return GGML_QUANT_SIZES[kind][0] > 1


@pytest.mark.parametrize("kind", [kind for kind in GGMLQuantizationType if _decodes(kind)], ids=lambda kind: kind.name)
def test_every_block_type_that_gguf_decodes_is_read(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    blocks = _random_blocks(kind, 3)
    writer = gguf.GGUFWriter(tmp_path / "blocks.gguf", "llama")
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.add_tensor("matrix", blocks, raw_dtype=kind)
    finish(writer)
    file = read_gguf_file(tmp_path / "blocks.gguf")
    assert file.tensors["matrix"].shape == (3, 512)
    assert np.array_equal(file.blocks("matrix"), blocks)
    assert np.array_equal(file.read("matrix"), dequantize(blocks, kind).reshape(3, 512))
    assert file.read("vector").tolist() == [0, 1, 2, 3, 4]


def test_the_header_agrees_with_the_gguf_packages_reader(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_name("tiny ✓")
        writer.add_array("general.tags", ["a", "β", ""])
        writer.add_array("general.numbers", [1.5, -2.0])
        writer.add_bool("general.flag", True)
        writer.add_int8("general.small", -3)
        writer.add_uint64("general.large", 2**40)

    path = write_gguf(tmp_path / "tiny.gguf", make_model("qwen2"), edit=edit)
    file, reference = read_gguf_file(path), gguf.GGUFReader(path)
    expected = {name: each.contents() for name, each in reference.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata == expected
    for tensor in reference.tensors:
        mine = file.tensors[tensor.name]
        assert (mine.shape, mine.offset) == (tuple(reversed(tensor.shape.tolist())), tensor.data_offset)


@pytest.fixture(scope="module")
def tiny_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", make_model("llama")).read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda _data: b"", "has 0 bytes and is no GGUF file"),
        (lambda data: data[:8], "has 8 bytes and is no GGUF file"),
        (lambda data: b"GGML" + data[4:], "is no GGUF file: it starts with b'GGML'"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "has GGUF version 1; versions 2 and 3 are read"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "is a big-endian GGUF file"),
        (lambda data: data[:200], "is truncated or garbled within its header"),
        (lambda data: data[:16] + struct.pack("<Q", 2**40) + data[24:], "is truncated or garbled within its header"),
        (lambda data: data[: len(data) // 2], r"is truncated: tensor [\w.]+ ends at byte \d+, the file has"),
        (lambda data: data[:-33], r"is truncated: tensor [\w.]+ ends at byte"),
        (lambda data: data + b"x" * 40, "bytes after its last tensor"),
        (lambda _data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer"),
        (lambda data: data.replace(b"llama.block_count", b"qwen3.block_count"), "llama.block_count must be a positive"),
    ],
)
def test_b77_damaged_gguf_files_are_refused_by_name_before_any_weight_is_read(
    damage: Callable[[bytes], bytes], message: str, tiny_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(tiny_bytes))
    monkeypatch.setattr("graphport.model_def.gguf.as_float32", None)  # reading would call it
    with pytest.raises(CheckpointError, match=rf"damaged\.gguf.*{message}"):
        load_checkpoint(path)


@pytest.mark.parametrize("cut", range(24, 1200, 97))
def test_b77_a_header_cut_anywhere_is_refused(cut: int, tiny_bytes: bytes, tmp_path: Path) -> None:
    (tmp_path / "cut.gguf").write_bytes(tiny_bytes[:cut])
    with pytest.raises(CheckpointError, match=r"cut\.gguf is truncated"):
        load_checkpoint(tmp_path / "cut.gguf")


def test_b77_flipped_header_bytes_are_refused_or_harmless_and_never_crash(tiny_bytes: bytes, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    path, refused = tmp_path / "flipped.gguf", 0
    for at in generator.integers(8, 2000, 120):
        data = bytearray(tiny_bytes)
        data[at] ^= int(generator.integers(1, 256))
        path.write_bytes(data)
        try:
            load_checkpoint(path)
        except CheckpointError:
            refused += 1
    assert refused > 60


@pytest.mark.parametrize(("number", "label"), [(99, "number 99"), (9, "Q8_1"), (26, "I32")])
def test_tensor_types_that_are_not_decoded_are_refused_by_name(
    number: int, label: str, tiny_bytes: bytes, tmp_path: Path
) -> None:
    name = b"blk.1.ffn_up.weight"
    at = tiny_bytes.index(name) + len(name) + 4 + 2 * 8
    (tmp_path / "x.gguf").write_bytes(tiny_bytes[:at] + struct.pack("<I", number) + tiny_bytes[at + 4 :])
    with pytest.raises(
        CheckpointError,
        match=rf"tensor blk\.1\.ffn_up\.weight has type {label}, which the gguf package does not decode; known are "
        r"F32, F16, Q4_0, .*Q6_K.*; quantise the model to one",
    ):
        load_checkpoint(tmp_path / "x.gguf")


def test_missing_and_extra_tensors_are_listed_in_one_error(tiny_bytes: bytes, tmp_path: Path) -> None:
    renamed = tiny_bytes.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_qq.weight")
    (tmp_path / "x.gguf").write_bytes(renamed)
    with pytest.raises(
        CheckpointError, match=r"missing: blk\.0\.ffn_up\.weight; not part of the model: blk\.0\.ffn_qq\.weight"
    ):
        load_checkpoint(tmp_path / "x.gguf")
