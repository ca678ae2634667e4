"""Device-resident decoding on a real CUDA device: graphs, reductions, streams and DLPack against their plain ways."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from parity import TOLERANCES
from sampling_bundles import sampling_plan
from tiny_bundles import tiny_config
from tiny_logits import random_logits
from tiny_models import tiny_configs, tiny_model
from tiny_requests import greedy, seeded

from graphport.export.append_sampling import append_sampling
from graphport.export.model_export import export
from graphport.model_def.signature import GREEDY_IDS, LOG_TOTAL, LOGITS, NUM_CANDIDATES, SEQLENS_K, TOP_IDS, TOP_LOGITS
from graphport.runtime import Session, load, open_bundle
from graphport.runtime.device import cuda_problem

pytestmark = pytest.mark.gpu

PROMPTS = [[1 + i, 2, 3 + 2 * i, 4, *range(5, 9 + 4 * i)] for i in range(5)]


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    problem = cuda_problem()
    if problem is not None:
        pytest.skip(problem)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gpu") / "bundle"
    return export(tiny_model(tiny_configs()["grouped_query"]), out, target="cuda", precision="fp16", verify=False).path


def ids_of(bundle: Path, params: Any, count: int, **options: Any) -> list[tuple[int, ...]]:
    with load(bundle, device="cuda", max_batch=8, **options) as lm:
        outputs = [lm.generate(PROMPTS[:count], params) for _ in range(2)]  # the second time graphs are there already
        assert [one.token_ids for one in outputs[0]] == [one.token_ids for one in outputs[1]]
        assert lm.cuda_graphs is (options.get("cuda_graphs") is not False)
        return [output.token_ids for output in outputs[0]]


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("params", [greedy(80, ignore_eos=True), seeded(3, 30)], ids=["greedy", "drawn"])
def test_captured_steps_give_the_ids_of_plain_steps(params: Any, count: int, bundle: Path) -> None:
    """Padded batches, and a cache that grows past its first size."""
    assert ids_of(bundle, params, count, cuda_graphs=True) == ids_of(bundle, params, count, cuda_graphs=False)


@pytest.mark.parametrize("rows", [1, 8, 600])
@pytest.mark.parametrize("vocab_size", [300, 49152, 262144])
def test_rows_are_reduced_to_what_numpy_says(vocab_size: int, rows: int) -> None:
    logits = np.stack([random_logits(seed, vocab_size) for seed in range(rows)])
    logits[0] = np.round(logits[0])  # many are equal
    x, copy = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["rows", vocab_size]))
        for name in ("x", LOGITS)
    )
    lengths = ir.Value(name=SEQLENS_K, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["batch"]))
    head = ir.node("Identity", [x], outputs=[copy])
    model = ir.Model(ir.Graph([x, lengths], [copy], nodes=[head], opset_imports={"": 23}), ir_version=10)
    append_sampling(model, sampling_plan(dataclasses.replace(tiny_config(), vocab_size=vocab_size)))
    providers = ["CUDAExecutionProvider"]
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=providers)
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {"x": logits, SEQLENS_K: np.zeros(rows, np.int32)}), strict=True))
    wide = logits.astype(np.float64)
    totals = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1))
    assert np.abs(found[LOG_TOTAL] - totals).max() < TOLERANCES["log probability", "float32"]
    assert (found[GREEDY_IDS][:, 0] == logits.argmax(1)).all()
    assert (found[TOP_LOGITS] == -np.sort(-logits, axis=1)[:, :NUM_CANDIDATES]).all()
    assert (np.take_along_axis(logits, found[TOP_IDS], 1) == found[TOP_LOGITS]).all()


def _needs_torch() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")


def test_ids_and_logits_are_shared_with_torch(bundle: Path) -> None:
    _needs_torch()
    sessions = [Session(open_bundle(bundle), device="cuda") for _ in range(2)]
    caches = [session.new_cache(max_slots=1, max_length=64) for session in sessions]
    for cache in caches:
        cache.claim()
    ids = torch.tensor([PROMPTS[0]], device="cuda")
    for _ in range(10):
        shared = torch.from_dlpack(sessions[0].run(caches[0], ids).device_logits())
        assert shared.device.type == "cuda"
        plain = sessions[1].step(caches[1], ids.cpu().numpy())
        assert (shared.cpu().numpy() == plain).all()
        ids = shared.argmax(1, keepdim=True)


def test_b94_views_that_are_not_contiguous_are_refused_on_the_device(bundle: Path) -> None:
    _needs_torch()
    session = Session(open_bundle(bundle), device="cuda")
    cache = session.new_cache(max_slots=1, max_length=64)
    cache.claim()
    wide = torch.arange(12, device="cuda").reshape(1, 12)
    for ids in (wide[:, ::2], wide.int(), wide.double()):
        with pytest.raises(ValueError, match="ids on a device must be contiguous int64"):
            session.run(cache, ids)
    assert cache.lengths[0] == 0


def test_the_callers_stream_is_ordered_with_what_it_did(bundle: Path) -> None:
    _needs_torch()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ids = torch.full((1, 16), 3, device="cuda")
        torch.cuda._sleep(100_000_000)
        ids += 2  # not done when `run` begins
        session = Session(open_bundle(bundle), device="cuda", stream=stream.cuda_stream)
        cache = session.new_cache(max_slots=1, max_length=64)
        cache.claim()
        found = session.step(cache, ids).copy()
    other = Session(open_bundle(bundle), device="cuda")
    cache = other.new_cache(max_slots=1, max_length=64)
    cache.claim()
    assert (other.step(cache, np.full((1, 16), 5)) == found).all()
