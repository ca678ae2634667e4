"""Fixtures of all tests: the real models' files, one seed a test, one thread a worker.

In: the environment variables GRAPHPORT_SMOLLM2, GRAPHPORT_MINILM, GRAPHPORT_GEMMA3, GRAPHPORT_GENAI and
GRAPHPORT_OPTIMUM, the checkout. Out: fixtures. Nothing downloads.
"""

import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import cuda_stubs
import numpy as np
import pytest
from cli_fakes import FakeExport, FakeRuntime

# Before anything loads OpenMP: a worker a core with as many threads each is several times slower than one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SEED = 20240229
CHECKOUT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses a real model is marked `real`."""
    for item in items:
        if {"smollm2_gguf", "gemma3_gguf", "minilm_folder"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("real")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Path of SmolLM2-135M-Instruct.Q4_1.gguf; without it the test is skipped, or fails where CI is set."""
    is_needed = bool(os.environ.get("CI"))
    return _real_file("GRAPHPORT_SMOLLM2", "SmolLM2-135M-Instruct.Q4_1.gguf", "`make fetch`", is_needed=is_needed)


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """Folder of all-MiniLM-L6-v2; without it the test is skipped, or fails where CI is set."""
    is_needed = bool(os.environ.get("CI"))
    weights = _real_file(
        "GRAPHPORT_MINILM", "all-MiniLM-L6-v2", "`make fetch`", "model.safetensors", is_needed=is_needed
    )
    return weights.parent


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Path of gemma-3-270m-q4_k_m.gguf, which is fetched on demand only; without it the test is skipped."""
    return _real_file("GRAPHPORT_GEMMA3", "gemma-3-270m-q4_k_m.gguf", "examples/fetch_gemma3.py", is_needed=False)


@pytest.fixture(scope="session")
def genai_python() -> Path:
    """The interpreter of an environment that has onnxruntime-genai; without it the test is skipped, or fails in CI."""
    given = os.environ.get("GRAPHPORT_GENAI")
    python = Path(given) if given else CHECKOUT / "build/genai/bin/python"
    if not given and not (CHECKOUT / "build/genai/.installed").is_file():
        message = f"{python.parent.parent} is not installed; run `make fetch` or set GRAPHPORT_GENAI to an interpreter"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    return python


@pytest.fixture(scope="session")
def optimum_python() -> Path:
    """The interpreter of an environment that has optimum, with a torch of its own; without it the test is skipped."""
    given = os.environ.get("GRAPHPORT_OPTIMUM")
    if not given:
        pytest.skip("GRAPHPORT_OPTIMUM names no interpreter of an environment with tests/requirements_optimum.txt")
    return Path(given)


def _real_file(variable: str, name: str, command: str, member: str = "", *, is_needed: bool) -> Path:
    """The file that `variable` or build/downloads names, or `member` of the folder that it names."""
    given = os.environ.get(variable)
    path = (Path(given) if given else CHECKOUT / "build/downloads" / name) / member
    if not path.is_file():
        message = f"{path} does not exist; run {command} or set {variable}"
        if given or is_needed:
            pytest.fail(message)
        pytest.skip(message)
    return path


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of CUDA libraries without a GPU; where they cannot be built, skipped, or failed where CI is set."""
    reason = cuda_stubs.why_not()
    if reason is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return cuda_stubs.build(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="session")
def cuda(stubs: Path) -> Iterator[cuda_stubs.Placer]:
    """Places graphs on a CUDA provider without a GPU."""
    with cuda_stubs.Placer(stubs) as placer:
        yield placer


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers in every run and order of tests; torch only where a test has imported it."""
    random.seed(SEED)
    np.random.seed(SEED)  # for code under test that uses the global state
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(SEED)
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_logging() -> Iterator[None]:
    """Commands that run in the tests' process set up its log; the next test finds it as it was."""
    root, ours = logging.getLogger(), logging.getLogger("graphport")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before


@pytest.fixture
def fake_runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """Stands in for `graphport.runtime` when a command imports it."""
    fake = FakeRuntime()
    monkeypatch.setitem(sys.modules, "graphport.runtime", fake)
    return fake


@pytest.fixture
def fake_export(monkeypatch: pytest.MonkeyPatch) -> FakeExport:
    """Stands in for `graphport.export` when a command imports it."""
    fake = FakeExport()
    monkeypatch.setitem(sys.modules, "graphport.export", fake)
    return fake
