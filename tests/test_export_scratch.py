"""Scratch folders: in memory where there is plenty of it, beside the bundle where not, and gone afterwards."""

from pathlib import Path

import pytest
from tiny_graphs import exported

import graphport.export.scratch as scratch_module
from graphport.export.scratch import scratch_folder


@pytest.mark.parametrize(("free", "in_memory"), [(1 << 40, True), (10_000, False)])
def test_a_graph_lies_in_memory_only_where_there_is_plenty(
    free: int, in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    fast.mkdir()
    slow.mkdir()
    monkeypatch.setattr(scratch_module, "_IN_MEMORY", fast)
    monkeypatch.setattr(scratch_module, "free_memory", lambda: free)
    with scratch_folder(exported("llama"), beside=slow) as folder:
        assert folder.parent == (fast if in_memory else slow)
        (folder / "model.onnx").touch()
    assert not any(path for place in (fast, slow) for path in place.iterdir())


def test_without_a_file_system_in_memory_a_graph_lies_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_module, "_IN_MEMORY", tmp_path / "absent")
    with scratch_folder(exported("llama"), beside=tmp_path) as folder:
        assert folder.parent == tmp_path
