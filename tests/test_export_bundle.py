"""Bundles on disk: whole or not at all, nothing replaced unasked, every byte of the data file referenced once."""

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tiny_graphs import CONFIGS, compiled, decoder_feed, make_config, open_folder, run_session

import graphport.export.bundle as bundle_module
from graphport.export.bundle import BundleError, bundle_folder, check_destination, record_files, write_graph
from graphport.model_def.config import ConfigError
from graphport.model_def.file_hashes import hash_file
from graphport.model_def.signature import (
    GRAPH_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    GenerationDefaults,
    Manifest,
    ManifestError,
    decoder_signature,
    read_manifest,
)

ALIGNMENT = 65536  # bytes; onnx_ir aligns large tensors for memory mapping


def write(out: Path, text: str, *, force: bool = False) -> None:
    with bundle_folder(out, force=force) as folder:
        (folder / MANIFEST_FILE).write_text(text)


def test_a_bundle_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with bundle_folder(out, force=False) as folder:
        assert folder.parent == out.parent
        assert not out.exists()
        (folder / MANIFEST_FILE).write_text("one")
    assert [path.name for path in out.parent.iterdir()] == ["b"]
    assert out.stat().st_mode & 0o777 == 0o755


def fail_halfway(out: Path) -> None:
    with bundle_folder(out, force=True) as folder:
        (folder / WEIGHTS_FILE).write_bytes(b"half")
        raise KeyboardInterrupt


@pytest.mark.parametrize("before", ["nothing", "a bundle", "an empty folder"])
def test_a_failure_leaves_what_was_there(before: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if before == "a bundle":
        write(out, "one")
    elif before == "an empty folder":
        out.mkdir()
    wanted = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        fail_halfway(out)
    assert sorted(tmp_path.rglob("*")) == wanted


def test_a_bundle_is_replaced_only_with_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "one")
    with pytest.raises(BundleError, match="out holds a bundle already; replace it with --force"):
        write(out, "two")
    assert (out / MANIFEST_FILE).read_text() == "one"
    write(out, "two", force=True)
    assert (out / MANIFEST_FILE).read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_is_no_bundle_is_never_replaced(kind: str, force: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
        (out / "thesis.txt").write_text("years of work")
    elif kind == "file":
        out.write_text("years of work")
    else:
        out.symlink_to(tmp_path / "gone")
    with pytest.raises(BundleError, match="exists and is no bundle; graphport does not replace it: choose another OUT"):
        write(out, "two", force=force)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_bundle_stays_a_link(tmp_path: Path) -> None:
    write(tmp_path / "real", "one")
    (tmp_path / "out").symlink_to(tmp_path / "real")
    write(tmp_path / "out", "two", force=True)
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "real" / MANIFEST_FILE).read_text() == "two"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_failed_swap_puts_the_earlier_bundle_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    write(out, "one")
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target == out and ".old." not in self.name:
            raise OSError(errno.EIO, "disk gone")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="disk gone"):
        write(out, "two", force=True)
    assert (out / MANIFEST_FILE).read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_destination_that_cannot_be_made_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match=r"cannot be made: .*file is no folder"):
        check_destination(tmp_path / "file" / "a" / "out", force=False)
    check_destination(tmp_path / "missing" / "out", force=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(BundleError, match=r"cannot be made: .* is not writable"):
            check_destination(tmp_path / "out", force=False)

    def refuse(**_: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(bundle_module.tempfile, "mkdtemp", refuse)
    with pytest.raises(BundleError, match=r"cannot be written: Permission denied .*choose another OUT"):
        write(tmp_path / "out", "one")


def ranges(folder: Path) -> list[tuple[int, int]]:
    """Offset and length of every tensor in the data file, in order."""
    model = onnx.load(folder / GRAPH_FILE, load_external_data=False)
    entries = [{e.key: e.value for e in tensor.external_data} for tensor in model.graph.initializer]
    assert {entry["location"] for entry in entries if entry} <= {WEIGHTS_FILE}
    return sorted((int(entry["offset"]), int(entry["length"])) for entry in entries if entry)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_b83_writing_twice_leaves_no_dead_bytes(precision: str, tmp_path: Path) -> None:
    out, digests = tmp_path / "out", []
    for _ in range(2):
        with bundle_folder(out, force=True) as folder:
            write_graph(compiled("llama", precision)[0], folder)
            (folder / MANIFEST_FILE).write_text("")
        digests.append({name: record.sha256 for name, record in record_files(out).items()})
        end = 0
        for offset, length in ranges(out):
            assert end <= offset < end + ALIGNMENT
            end = offset + length
        assert (out / WEIGHTS_FILE).stat().st_size == end
    assert digests[0] == digests[1]


def test_b84_two_bundles_beside_each_other_keep_their_weights(tmp_path: Path) -> None:
    wanted = {}
    for name in ("llama", "gpt"):
        with bundle_folder(tmp_path / name, force=False) as folder:
            write_graph(compiled(name)[0], folder)
        wanted[name] = run_session(open_folder(tmp_path / name), decoder_feed(CONFIGS[name], (0,), 4))["logits"]
    for name, logits in wanted.items():
        found = run_session(open_folder(tmp_path / name), decoder_feed(CONFIGS[name], (0,), 4))["logits"]
        assert np.array_equal(found, logits)
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [GRAPH_FILE, WEIGHTS_FILE]


def test_b82_a_bundle_may_be_moved_and_run_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = decoder_feed(CONFIGS["llama"], (0,), 4)
    first = tmp_path / "first"
    with bundle_folder(first, force=False) as folder:
        write_graph(compiled("llama")[0], folder)
    wanted = run_session(open_folder(first), feed)["logits"]
    moved = first.rename(tmp_path / "eine Kopie, größer")
    (tmp_path / "link").symlink_to(moved)
    for place in (Path("/"), tmp_path, moved):
        monkeypatch.chdir(place)
        for path in (moved, tmp_path / "link", Path(os.path.relpath(moved))):
            assert np.array_equal(run_session(open_folder(path), feed)["logits"], wanted)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_b89_every_artefact_has_versions_that_the_runtime_accepts(precision: str, tmp_path: Path) -> None:
    write_graph(compiled("mixed", precision)[0], tmp_path)
    model = onnx.load(tmp_path / GRAPH_FILE)
    assert model.ir_version <= 13
    versions = {entry.domain: entry.version for entry in model.opset_import}
    assert versions.pop("") == 23
    assert versions == {"com.microsoft": 1, "graphport": 1}
    assert {f.name for f in model.functions} >= {
        node.op_type for node in model.graph.node if node.domain == "graphport"
    }


def test_b81_weights_leave_the_graph_file_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing serialises the weights with the graph: it stays small, whatever the limit."""
    model, _ = compiled("llama")
    write_graph(model, tmp_path)
    tensors = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    parameters = sum(tensor.nbytes for tensor in tensors if tensor.nbytes > 128)
    assert (tmp_path / GRAPH_FILE).stat().st_size < 30_000
    monkeypatch.setattr(bundle_module, "EXTERNAL_BYTES", 128)
    monkeypatch.setattr(ir, "to_proto", lambda *_: pytest.fail("the model as one message"))
    (tmp_path / "all").mkdir()
    write_graph(compiled("llama")[0], tmp_path / "all")
    assert (tmp_path / "all" / WEIGHTS_FILE).stat().st_size >= parameters
    assert run_session(open_folder(tmp_path / "all"), decoder_feed(CONFIGS["llama"], (0,), 4))["logits"].any()


def manifest() -> Manifest:
    config = make_config()
    return Manifest(
        graphport_version="0.1.0",
        kind="decoder",
        target="cpu",
        precision="int8",
        max_length=64,
        config=config,
        signature=decoder_signature(config),
        generation=GenerationDefaults(eos_token_ids=(2, 7), bos_token_id=1),
        source={"format": "gguf", "name": "größe.gguf", "sha256": "0" * 64},
        files={},
    )


def test_a_manifest_comes_back_equal(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    written = dataclasses.replace(manifest(), files=record_files(tmp_path))
    (tmp_path / MANIFEST_FILE).write_text(written.to_json(), encoding="utf-8")
    assert read_manifest(tmp_path) == written
    assert written.cache_dtype == "float32"
    assert written.files["x"].size == 3
    assert written.files["x"].sha256 == hash_file(tmp_path / "x")
    assert written.files["x"].sha256.startswith("ba7816bf")


def test_a_manifest_that_is_missing_torn_newer_or_strange_is_refused(tmp_path: Path) -> None:
    path, text = tmp_path / MANIFEST_FILE, manifest().to_json()
    with pytest.raises(ManifestError, match=r"is no graphport bundle: it has no manifest.json"):
        read_manifest(tmp_path)
    newer = json.dumps({**json.loads(text), "format": 2})
    cases = {
        text[:200]: "is damaged",
        "[]": "is damaged",
        "null": "is damaged",
        "": "is damaged",
        newer: "has format 2, this graphport reads 1; export the bundle again",
        json.dumps({**json.loads(text), "colour": "red"}): "is damaged .*colour",
        text.replace('"num_heads": 4', '"num_heads": 5'): r"is damaged \(num_heads \(5\) must be divisible",
        text.replace('"precision": "int8",', ""): "is damaged .*precision",
    }
    for content, message in cases.items():
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ManifestError, match=message):
            read_manifest(tmp_path)
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ManifestError, match="is damaged"):
        read_manifest(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="is damaged"):
        read_manifest(tmp_path)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("max_length",), 0, "max_length must be a whole number from 1 to max_positions"),
        (("max_length",), 10**9, "max_length must be a whole number from 1 to max_positions"),
        (("max_length",), 8.5, "max_length must be a whole number .* got 8.5"),
        (("max_length",), True, "max_length must be a whole number .* got True"),
        (("max_length",), "64", "max_length must be a whole number .* got '64'"),
        (
            ("kind",),
            "other",
            "kind must be one of decoder, encoder, image_encoder, encoder_decoder, recurrent_decoder, got 'other'",
        ),
        (("kind",), "encoder", "kind is encoder, but the configuration is a decoder's"),
        (("target",), None, "target must be text, got None"),
        (("source", "name"), 5, "name must be text, got 5"),
        (("generation", "eos_token_ids"), [2, -1], "token ids must be whole numbers from 0, got -1"),
        (("generation", "eos_token_ids"), "27", "token ids must be whole numbers from 0, got '2'"),
        (("generation", "eos_token_ids"), [[2]], r"token ids must be whole numbers from 0, got \[2\]"),
        (("generation", "eos_token_ids"), [None], "token ids must be whole numbers from 0, got None"),
        (("generation", "bos_token_id"), 1.5, "token ids must be whole numbers from 0, got 1.5"),
        (("files",), {"x": {"size": "1", "sha256": ""}}, "the record of x must be a size and a hash, got '1'"),
        (("files",), {"x": {"size": 1, "sha256": None}}, "the record of x must be a size and a hash, got 1, None"),
    ],
)
def test_a_manifest_with_values_that_no_export_writes_is_refused(
    tmp_path: Path, place: tuple[str, ...], value: object, message: str
) -> None:
    data = json.loads(manifest().to_json())
    *parents, last = place
    inner = data
    for key in parents:
        inner = inner[key]
    inner[last] = value
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ManifestError, match=f"is damaged .*{message}"):
        read_manifest(tmp_path)


def test_a_manifest_with_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    text = manifest().to_json().replace('"dtype": "int32"', '"dtype": "int31"', 1)
    (tmp_path / MANIFEST_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ManifestError, match=r"the dtype of seqlens_k must be one of float32.*got 'int31'"):
        read_manifest(tmp_path)


def test_a_mount_point_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "volume"
    out.mkdir()
    for path in (out, Path("/")):
        monkeypatch.setattr(Path, "is_mount", lambda found, path=path: found == path)
        with pytest.raises(BundleError, match=r"is a mount point, which cannot be replaced; choose a folder in it: .*"):
            check_destination(path, force=True)


@pytest.mark.parametrize("out", [".", "", "../here"])
def test_the_current_folder_is_not_replaced_beneath_its_user(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(BundleError, match="is the current folder, which cannot be replaced; choose a folder in it"):
        check_destination(Path(out), force=True)


def test_a_folder_that_cannot_be_moved_aside_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def refuse(source: Path, target: Path) -> None:
        raise OSError(16, "Device or resource busy", str(source), None, str(target))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="Device or resource busy"), bundle_folder(out, force=False):
        pass
    assert list(tmp_path.iterdir()) == [out]
