"""A short soak: mixed requests, many at once, each answered as it is alone; and a check that can fail."""

from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from soak import Soak, run_soak
from soak_callers import Said, ask, mixed_cases
from tiny_bundles import write_tiny_bundle
from tiny_server import serving, wait_until

from graphport.runtime.server_settings import ServerSettings


def test_sixty_mixed_requests_are_answered_as_each_is_alone(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path / "tiny", tokenizer=True, eos_token_ids=(1,)).folder
    cases = mixed_cases("tiny", 24, seed=1, most_words=8, most_tokens=20)
    with serving({"tiny": bundle}, ServerSettings(max_queue=32), max_batch=4, prefix_cache_bytes=1 << 20) as server:
        memory = psutil.Process().memory_info
        alone = [ask(server.host, server.port, case) for case in cases]

        def soak(expected: list[Said], requests: int) -> Soak:
            options: dict[str, Any] = {
                "requests": requests,
                "concurrent": 12,
                "seed": 2,
                "memory": lambda: memory().rss,
            }
            return run_soak(server.host, server.port, cases, expected, **options)

        found = soak(alone, 60)
        assert found.wrong == []
        assert found.counts.total() == 60
        assert len(found.counts) == 8
        wait_until(lambda: server.places == 0, "all places are free")
        assert len(soak([*alone[8:], *alone[:8]], 24).wrong) > 12  # another request's answer is noticed


def test_growth_is_that_of_the_last_half() -> None:
    def grown(sizes: list[int]) -> float:
        memory = [(number, size) for number, size in enumerate(sizes, start=1)]
        return Soak(counts=cases, wrong=[], memory=memory, seconds=1).growth

    cases: Counter[str] = Counter()
    assert grown([1, 5, 9, 10, 100, 100, 100, 100, 100, 100, 100, 100]) == 0
    assert grown([100] * 10 + [100, 100, 104, 104]) == pytest.approx(0.04)
    assert grown([100, 100, 100, 100, 100, 500, 100, 100, 100, 100, 100, 100]) == 0
