"""Pages given back: what was read is unmapped, what was written stays, values never change."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from graphport.runtime.resident_memory import forget_mapped, return_freed

_SIZE = 4 << 20  # bytes


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.data"
    path.write_bytes(np.random.default_rng(0).bytes(_SIZE))
    return path


@pytest.fixture
def mapped(weights: Path) -> Iterator[mmap.mmap]:
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as pages:
        yield pages


def _sum(pages: mmap.mmap) -> int:
    return sum(pages[:])


def test_read_pages_are_unmapped_and_read_again(weights: Path, mapped: mmap.mmap) -> None:
    before = _sum(mapped)
    assert forget_mapped(weights) == _SIZE
    assert forget_mapped(weights) == 0
    assert _sum(mapped) == before


def test_a_mapping_that_was_written_is_left_alone(weights: Path, mapped: mmap.mmap) -> None:
    mapped[5] = (mapped[5] + 1) % 256
    written = _sum(mapped)
    assert forget_mapped(weights) == 0
    assert _sum(mapped) == written


def test_other_files_keep_their_pages(weights: Path, mapped: mmap.mmap) -> None:
    _sum(mapped)
    assert forget_mapped(weights.with_name("other.data")) == 0
    assert forget_mapped(weights) == _SIZE


def test_freed_memory_is_returned_without_harm() -> None:
    kept = np.arange(1000)
    return_freed()
    assert kept.sum() == 499_500
