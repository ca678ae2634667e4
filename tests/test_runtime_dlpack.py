"""Tensors of other libraries as ids, logits to other libraries: shared where they lie, or refused in one line."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from fake_cuda import on_fake_device
from parity import TOLERANCES
from sampling_bundles import write_sampling_bundle
from tiny_bundles import VOCAB, TinyBundle, reference_logits, write_tiny_bundle
from tiny_sessions import open_session

from graphport.runtime.device_memory import HostMemory
from graphport.runtime.dlpack import DlpackTensor, take_ids
from graphport.runtime.session import Session

TOLERANCE = TOLERANCES["tiny bundle", "float32"]
IDS = np.array([[3, 1, 4, 1, 5, 9]])
CUDA = 2  # DLDeviceType


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("dlpack") / "bundle")


@pytest.fixture(scope="module")
def session(bundle: TinyBundle) -> Session:
    return open_session(bundle.folder)


class OnCuda:
    """A producer that says it lies on a CUDA device, with memory that the CPU can read."""

    def __init__(self, array: Any, number: int = 0) -> None:
        self.array = array
        self.number = number
        self.streams: list[Any] = []

    def __dlpack__(self, *, stream: Any = None) -> object:
        self.streams.append(stream)
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.number


def logits_of(session: Session, ids: Any) -> np.ndarray[Any, Any]:
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    return session.step(cache, ids, np.arange(ids.shape[1])).copy()


def six_of(base: Any) -> dict[str, Any]:
    """IDS in layouts that are not what a plain pointer would read."""
    wide = base(np.repeat(IDS, 2, 0).T.copy())  # [6, 2]
    return {
        "transposed": wide[:, :1].T,
        "strided": base(np.stack([IDS[0], IDS[0] + 1], 1).reshape(1, 12))[:, ::2],
        "offset": base(np.concatenate([[[7]], IDS], 1))[:, 1:],
        "plain": base(IDS.copy()),
    }


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset", "plain"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_b94_ids_on_the_host_count_as_they_are_indexed_whatever_their_layout(
    library: str, layout: str, session: Session, bundle: TinyBundle
) -> None:
    ids = six_of(np.asarray if library == "numpy" else torch.from_numpy)[layout]
    assert np.abs(logits_of(session, ids) - reference_logits(bundle.weights, IDS[0].tolist())).max() < TOLERANCE


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64", "uint16"])
def test_b94_integers_of_any_width_are_the_same_ids(dtype: str, session: Session, bundle: TinyBundle) -> None:
    ids = np.asfortranarray(IDS.astype(dtype))
    assert np.abs(logits_of(session, ids) - reference_logits(bundle.weights, IDS[0].tolist())).max() < TOLERANCE


def test_b94_an_expanded_row_decodes_as_its_copies(session: Session, bundle: TinyBundle) -> None:
    cache = session.new_cache(max_slots=3, max_length=64)
    for _ in range(3):
        session.run(cache, IDS, first_slot=cache.claim())
    logits = session.step(cache, torch.tensor([[7]]).expand(3, 1))
    expected = reference_logits(bundle.weights, [*IDS[0].tolist(), 7])[-1]
    assert np.abs(logits - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        (np.array([[1.0]]), TypeError, "ids must be integers, got float64"),
        (torch.ones(1, 2), TypeError, "ids must be integers, got float32"),
        (np.array([[True]]), TypeError, "ids must be integers, got bool"),
        (np.array([1, 2]), ValueError, r"ids must be \[rows, tokens\], got 1 dimensions: \[2\]"),
        (torch.ones(1, 1, 1, dtype=torch.int64), ValueError, r"got 3 dimensions: \[1, 1, 1\]"),
        ([[1, 2]], TypeError, "ids must be an array or a DLPack tensor .* got list"),
        (OnCuda(IDS), ValueError, "ids lie on cuda:0, the session runs on cpu:0; move them there"),
    ],
)
def test_b94_what_is_no_row_of_ids_is_refused(ids: Any, error: type[Exception], match: str, session: Session) -> None:
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    with pytest.raises(error, match=match):
        session.run(cache, ids)
    assert cache.lengths[0] == 0


def test_b94_a_tensor_that_requires_grad_is_refused_by_its_library(session: Session) -> None:
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    with pytest.raises((BufferError, TypeError, RuntimeError), match=r"requir|integers"):
        session.run(cache, torch.ones(1, 2, requires_grad=True))


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (torch.from_numpy(np.repeat(IDS, 2, 0)).T, "contiguous int64; make them so first"),
        (torch.tensor([[7]]).expand(3, 1), "contiguous int64; make them so first"),
        (torch.from_numpy(np.repeat(IDS, 2, 1))[:, ::2], "contiguous int64; make them so first"),
        (np.asfortranarray(np.repeat(IDS, 2, 0)), "contiguous int64; make them so first"),
        (torch.from_numpy(IDS).int(), r"contiguous int64, got tensor\(int32\); convert them first"),
        (torch.ones(1, 2, dtype=torch.float64), r"contiguous int64, got tensor\(double\)"),
        (torch.ones(1, 2, dtype=torch.bool), "contiguous int64"),
        (torch.ones(1, 2, requires_grad=True), "contiguous int64; make them so first .*requires? grad"),
        (torch.ones(2, dtype=torch.int64), r"must be \[rows, tokens\], got 1 dimensions"),
    ],
)
def test_b94_ids_on_a_device_must_be_what_the_kernel_reads(ids: Any, match: str) -> None:
    memory = HostMemory()
    memory.device = "cuda"
    with pytest.raises(ValueError, match=match):
        take_ids(OnCuda(ids), memory)


def test_ids_of_another_device_of_the_same_kind_are_refused() -> None:
    memory = HostMemory()
    memory.device = "cuda"
    with pytest.raises(ValueError, match="ids lie on cuda:1, the session runs on cuda:0"):
        take_ids(OnCuda(IDS, number=1), memory)


def test_ids_on_the_device_stay_there_and_are_ready_on_the_sessions_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop whose ids never are on the host: they go in from where they lie, and logits come out where they lie."""
    weights = write_sampling_bundle(tmp_path).weights
    session = open_session(tmp_path)
    fake = on_fake_device(session, monkeypatch)
    monkeypatch.setattr(session._memory, "device", "cuda")  # for ids and logits; bindings follow the real device
    _bind_on_the_cpu(session, monkeypatch)
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    text = IDS[0].tolist()
    producer = OnCuda(torch.from_numpy(IDS))
    outputs = session.run(cache, producer)
    assert producer.streams == [session._memory.stream]
    fake.reset()
    for _ in range(8):
        logits = _as_torch(outputs.device_logits())
        text.append(int(logits[0].argmax()))
        outputs = session.run(cache, OnCuda(logits.argmax(1, keepdim=True)))
    assert fake.bytes["download"] == 8 * 12  # the reduced row; of ids and logits, nothing
    expected = reference_logits(weights, text)[-1]
    assert np.abs(_as_torch(outputs.device_logits())[0].numpy() - expected).max() < TOLERANCE


def test_ids_from_the_host_after_ids_from_the_device_are_not_taken_for_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_sampling_bundle(tmp_path).weights
    session = open_session(tmp_path)
    on_fake_device(session, monkeypatch)
    monkeypatch.setattr(session._memory, "device", "cuda")
    _bind_on_the_cpu(session, monkeypatch)
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    text = [5]
    session.run(cache, np.array([[5]]))
    for token, on_device in ((5, True), (5, False), (9, True), (5, False), (5, False)):
        ids = np.array([[token]])
        logits = session.step(cache, OnCuda(ids) if on_device else ids)
        text.append(token)
        assert np.abs(logits - reference_logits(weights, text)[-1]).max() < TOLERANCE


@pytest.mark.parametrize("take", [np.from_dlpack, torch.from_dlpack])
def test_logits_are_shared_not_copied(take: Any, session: Session, bundle: TinyBundle) -> None:
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    outputs = session.run(cache, IDS, np.array([2, 5]))
    logits = take(outputs.device_logits())
    assert tuple(logits.shape) == (2, VOCAB)
    assert np.abs(np.asarray(logits) - reference_logits(bundle.weights, IDS[0].tolist())[[2, 5]]).max() < TOLERANCE
    outputs.logits()[0, 0] = 99
    assert float(logits[0, 0]) == 99


def test_shared_logits_outlive_the_session(bundle: TinyBundle) -> None:
    session = open_session(bundle.folder)
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    outputs = session.run(cache, IDS)
    logits, values = torch.from_dlpack(outputs.device_logits()), outputs.logits().copy()
    del session, cache, outputs
    gc.collect()
    assert (logits.numpy() == values).all()


def test_memory_is_given_back_after_the_last_consumer_or_an_unused_capsule() -> None:
    memory = HostMemory()
    tensor = memory.tensor((3, 5), "float32")
    shared = DlpackTensor(tensor, (2, 5), device="cpu", device_id=0)
    owner = weakref.ref(tensor.owner)
    consumers = [torch.from_dlpack(shared), np.from_dlpack(shared), shared.__dlpack__()]
    del tensor, shared
    while consumers:
        gc.collect()
        assert owner() is not None
        consumers.pop()
    gc.collect()
    assert owner() is None


def test_a_copy_or_another_device_is_not_to_be_had() -> None:
    shared = DlpackTensor(HostMemory().tensor((3, 5), "float32"), (2, 5), device="cpu", device_id=0)
    assert shared.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="shared, not copied"):
        np.from_dlpack(shared, copy=True)
    with pytest.raises(BufferError, match=r"DLPack device \(1, 0\), not on \(2, 0\)"):
        shared.__dlpack__(dl_device=(CUDA, 0))


def test_no_library_is_imported_for_it() -> None:
    code = "import sys, graphport.runtime.dlpack; sys.exit(any(m in sys.modules for m in ('torch', 'onnx', 'cupy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _bind_on_the_cpu(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let bindings name the CPU, where a fake device's addresses are."""
    for kind in ("bind_input", "bind_output"):
        bind = getattr(onnxruntime.IOBinding, kind)

        def on_the_cpu(binding: Any, name: str, _device: str, *rest: Any, bind: Any = bind) -> None:
            bind(binding, name, "cpu", *rest)

        monkeypatch.setattr(onnxruntime.IOBinding, kind, on_the_cpu)


def _as_torch(shared: DlpackTensor) -> Any:
    """A tensor over the logits, as torch on CUDA would make it."""
    assert shared.__dlpack_device__() == (CUDA, 0)
    return torch.from_dlpack(DlpackTensor(shared._tensor, shared.shape, device="cpu", device_id=0))
