"""Opening a bundle: refused before anything is taken, or opened with options, limits and memory that are stated."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import cuda_stubs
import pytest
from tiny_bundles import write_tiny_bundle

from graphport.model_def.signature import DType
from graphport.runtime import opening
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.cuda_device import CudaError
from graphport.runtime.cuda_setup import CudaSetup
from graphport.runtime.device import DeviceError, DeviceRequest
from graphport.runtime.memory import MIB, NotEnoughMemoryError
from graphport.runtime.memory_plan import RunLimits, longest_that_fits, most_rows_that_fit, plan_memory
from graphport.runtime.model_sizes import model_sizes
from graphport.runtime.opening import open_graph

LIMITS = RunLimits(max_batch=4, max_length=128, prefill_chunk=16)

# Opens a bundle with the arguments given as JSON; prints what came of it, and what of the device's memory is taken.
_OPEN = """
import json, logging, sys
from graphport.runtime import load
from graphport.runtime.cuda_device import device_memory
logging.basicConfig(format="%(message)s")
logging.getLogger("graphport").setLevel(logging.INFO)
try:
    lm = load(sys.argv[1], threads=1, **json.loads(sys.argv[2]))
    cuda = lm.device == "cuda"
    facts = {"device": lm.device, "device_id": lm.device_id, "options": dict(lm.provider_options)}
    facts |= {"arena_limit": lm.memory_plan.arena_limit, "weights": lm.memory_plan.weights}
except Exception as error:
    cuda, facts = True, {"error": f"{type(error).__name__}: {error}"}
memory = device_memory(0) if cuda else None
print(json.dumps(facts | {"taken": memory.total - memory.free if memory else 0}))
"""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of hand-built bundles by the type they compute in; float32 is for the CPU, the others for CUDA."""
    types: tuple[DType, ...] = ("float32", "float16", "bfloat16")
    return {
        floats: write_tiny_bundle(
            tmp_path_factory.mktemp(floats) / "bundle",
            floats=floats,
            target="cpu" if floats == "float32" else "cuda",
            tokenizer=True,
        ).folder
        for floats in types
    }


def opened(stubs: Path, folder: Path, arguments: dict[str, Any], **machine: str) -> tuple[dict[str, Any], list[str]]:
    """What became of opening the bundle on a machine that the stubs imitate, and the lines logged."""
    done = cuda_stubs.run_python(stubs, _OPEN, str(folder), json.dumps(arguments), **machine)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line), done.stderr.splitlines()


def test_b53_a_session_on_cuda_states_its_options_and_that_tf32_is_off(stubs: Path, bundles: dict[str, Path]) -> None:
    facts, logged = opened(stubs, bundles["float16"], {"device": "cuda"})
    assert (facts["device"], facts["device_id"]) == ("cuda", 0)
    options = facts["options"]
    assert options["use_tf32"] == "0"
    assert options["arena_extend_strategy"] == "kNextPowerOfTwo"
    assert options["gpu_mem_limit"] == str(facts["arena_limit"])
    assert "CUDA device 0: TF32 off, memory planned: weights 0.1, workspace" in logged[-1]
    assert facts["weights"] / 2 < facts["taken"] < facts["weights"] + MIB  # beside it only the arena's first blocks


def test_b53_tf32_is_on_for_a_caller_who_asks_and_the_log_says_so(stubs: Path, bundles: dict[str, Path]) -> None:
    arguments = {"provider_options": {"use_tf32": 1, "sdpa_kernel": "2"}}
    facts, logged = opened(stubs, bundles["bfloat16"], arguments)
    assert facts["device"] == "cuda"  # auto follows the target
    assert (facts["options"]["use_tf32"], facts["options"]["sdpa_kernel"]) == ("1", "2")
    assert "CUDA device 0: TF32 on, as asked for" in logged[-1]


def test_the_device_asked_for_by_number_is_the_one_that_is_taken(stubs: Path, bundles: dict[str, Path]) -> None:
    facts, logged = opened(stubs, bundles["float16"], {"device_id": 2}, STUB_DEVICES="3")
    assert (facts["device_id"], facts["options"]["device_id"]) == (2, "2")
    assert "CUDA device 2:" in logged[-1]
    facts, _ = opened(stubs, bundles["float16"], {"device": "cuda", "device_id": 3}, STUB_DEVICES="3")
    assert "device_id is 3, but there are 3 devices, numbers 0 to 2" in facts["error"]


def test_a_gpu_without_room_for_the_smallest_cache_is_refused_before_anything_is_taken(
    stubs: Path, bundles: dict[str, Path]
) -> None:
    facts, _ = opened(stubs, bundles["float16"], {"device": "cuda"}, STUB_MEMORY=str(200 * MIB))
    assert facts["taken"] == 0
    assert facts["error"].startswith(
        f"NotEnoughMemoryError: opening {bundles['float16']} on CUDA device 0 for one row of 64 tokens (weights 0.1, "
        "workspace "
    )
    assert facts["error"].endswith(
        "200.0 MiB are free; no context fits; free memory there, or export with a smaller precision"
    )


def test_a_gpu_with_room_for_less_than_the_limits_says_up_to_what_it_fits(
    stubs: Path, bundles: dict[str, Path]
) -> None:
    sizes = model_sizes(open_bundle(bundles["float16"]), "cuda")
    limits = RunLimits(max_batch=900, max_length=128, prefill_chunk=512)
    free = plan_memory(sizes, dataclasses.replace(limits, max_length=100)).total
    facts, logged = opened(stubs, bundles["float16"], {"max_batch": 900}, STUB_MEMORY=str(free))
    rows = most_rows_that_fit(sizes, limits, free)
    assert facts["device"] == "cuda"
    assert longest_that_fits(sizes, limits, free) == 100
    assert 0 < rows < 900
    assert f"900 rows of 128 tokens need {plan_memory(sizes, limits).total / MIB:.1f}" in logged[0]
    assert logged[0].endswith(f"up to 100 tokens a row fit, or {rows} rows")
    assert logged[0].startswith(f"CUDA device 0 has {free / MIB:.1f} MiB free")


_GROW = """
import json, sys
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.cuda_device import device_memory
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.session import Session

limits = RunLimits(max_batch=8, max_length=200_000, prefill_chunk=16)
session = Session(open_bundle(sys.argv[1]), device="cuda", limits=limits, threads=1)

def use():
    cache = session.new_cache(max_slots=8, max_length=200_000)
    for slots, length in ((1, 5), (2, 70), (5, 130), (8, 4000)):
        cache.claim()
        cache.lengths[: cache.num_active] = 1
        cache.reserve(slots, length)
    return cache

free = []
for _ in range(60):
    use()
    free.append(device_memory(0).free)
cache = use()
before, capacity = device_memory(0).free, cache.capacity
try:
    cache.reserve(8, 200_000)
    refused = ""
except MemoryError as error:
    refused = str(error)
unchanged = (device_memory(0).free, cache.capacity) == (before, capacity)
print(json.dumps({"free": free, "refused": refused, "unchanged": unchanged, "before": before}))
"""


def test_b97_device_memory_stays_flat_and_growth_beyond_it_is_refused_with_what_would_fit(
    stubs: Path, bundles: dict[str, Path]
) -> None:
    done = cuda_stubs.run_python(stubs, _GROW, str(bundles["float16"]), STUB_MEMORY=str(300 * MIB))
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert len(set(facts["free"][10:])) == 1
    row = 2 * 2 * 2 * 16 * 2  # layers x (keys, values) x kv heads x head size x bytes: of a token
    needed, free, room = 8 * 200_000 * row / MIB, facts["before"] / MIB, facts["before"] // row
    assert facts["refused"] == (
        f"a KV cache of 8 rows of 200000 tokens needs {needed:.1f} MiB, {free:.1f} MiB are free; {room // 8} tokens a "
        f"row would fit with 8 rows, {room // 200_000} rows with 200000 tokens; lower max_length or max_batch"
    )
    assert facts["unchanged"]


_CLI = """
import sys
from graphport.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("floats", "device", "machine", "expected"),
    [
        (
            "bfloat16",
            "cpu",
            {},
            "{folder} cannot run on the CPU: it computes in bfloat16, for which the CPU has no kernels; export it for "
            "the CPU with `graphport export SOURCE OUT --target cpu`, or run it on a GPU (use device='cuda')",
        ),
        (
            "bfloat16",
            "auto",
            {"CUDA_VISIBLE_DEVICES": ""},
            "{folder} cannot run on the CPU: it computes in bfloat16, for which the CPU has no kernels; export it for "
            "the CPU with `graphport export SOURCE OUT --target cpu`, or run it on a GPU (CUDA cannot be used: no CUDA "
            "device is visible: CUDA_VISIBLE_DEVICES is '', unset it or name a device: 0)",
        ),
        (
            "float32",
            "cuda",
            {},
            "{folder} cannot run on CUDA: it computes in float32, for which CUDA has no GroupQueryAttention: attention "
            "would run on the CPU; export it with --target cuda",
        ),
        (
            "float16",
            "cuda",
            {"CUDA_VISIBLE_DEVICES": ""},
            "device cuda cannot be used: no CUDA device is visible: CUDA_VISIBLE_DEVICES is '', unset it or name a "
            "device: 0; use device='cpu' to run without it",
        ),
        (
            "float16",
            "cuda",
            {"STUB_DRIVER": "12040"},
            "device cuda cannot be used: the NVIDIA driver is too old: it serves CUDA 12.4, onnxruntime-gpu 1.",
        ),
        (
            "float16",
            "cuda",
            {"STUB_MEMORY": "1000000"},
            "opening {folder} on CUDA device 0 for one row of 64 tokens (",
        ),
    ],
)
def test_bad_input_is_one_clear_line_on_the_command_line(
    stubs: Path, bundles: dict[str, Path], floats: str, device: str, machine: dict[str, str], expected: str
) -> None:
    folder = bundles[floats]
    done = cuda_stubs.run_python(stubs, _CLI, "generate", str(folder), "cat", "--raw", "--device", device, **machine)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("graphport: error: " + expected.format(folder=folder))


NO_GRAPHS = CudaSetup(cuda_graphs=False, stream=None)


def request(**changes: Any) -> DeviceRequest:
    return DeviceRequest(**{"wish": "cpu", **changes})


def test_weights_larger_than_free_memory_are_refused(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "free_memory", lambda: 1000)
    with pytest.raises(
        NotEnoughMemoryError,
        match=r"opening .* on the CPU for one row of 64 tokens \(weights 0.\d, .*needs .* MiB, 0.0 MiB are free",
    ):
        open_graph(open_bundle(bundles["float32"]), request(), LIMITS, NO_GRAPHS, threads=1)


def test_a_cpu_with_room_for_less_than_the_limits_says_up_to_what_it_fits(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="graphport")
    bundle = open_bundle(bundles["float32"])
    sizes = model_sizes(bundle, "cpu")
    free = plan_memory(sizes, dataclasses.replace(LIMITS, max_length=77)).total
    monkeypatch.setattr(opening, "free_memory", lambda: free)
    plan = open_graph(bundle, request(), LIMITS, NO_GRAPHS, threads=1).plan
    (record,) = caplog.records
    assert plan == plan_memory(sizes, LIMITS)
    assert record.getMessage().endswith(f"up to 77 tokens a row fit, or {most_rows_that_fit(sizes, LIMITS, free)} rows")
    caplog.clear()
    monkeypatch.setattr(opening, "free_memory", lambda: plan.total)
    open_graph(bundle, request(), LIMITS, NO_GRAPHS, threads=1)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"provider_options": {"use_tf32": "1"}}, "provider_options cannot be heeded: device is 'cpu'; leave out"),
        ({"device_id": 1}, "device_id cannot be heeded: device is 'cpu'"),
        (
            {"wish": "auto", "device_id": 1, "provider_options": {"use_tf32": "1"}},
            r"device_id and provider_options cannot be heeded: device auto took the CPU \(the bundle was compiled for",
        ),
        ({"provider_options": {"use_tf23": "1"}}, "no provider option 'use_tf23'"),
    ],
)
def test_options_of_cuda_are_not_ignored_on_the_cpu(
    bundles: dict[str, Path], changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        open_graph(open_bundle(bundles["float32"]), request(**changes), LIMITS, NO_GRAPHS, threads=1)


def test_b91_auto_says_in_one_line_what_it_took(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="graphport")
    auto = request(wish="auto")
    assert open_graph(open_bundle(bundles["float32"]), auto, LIMITS, NO_GRAPHS, threads=1).device == "cpu"
    assert [record.getMessage() for record in caplog.records] == ["device auto: cpu (the bundle was compiled for cpu)"]
    caplog.clear()
    monkeypatch.setattr("graphport.runtime.device.cuda_problem", lambda _: "no driver")
    assert open_graph(open_bundle(bundles["float16"]), auto, LIMITS, NO_GRAPHS, threads=1).device == "cpu"
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.WARNING, "device auto: cpu (no driver)")


def test_b91_b92_cuda_that_is_listed_but_broken_is_an_error_and_auto_takes_the_cpu(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def device_memory(_: int) -> None:
        raise CudaError("cudaMemGetInfo failed with CUDA error 46: all devices are busy")

    monkeypatch.setattr("graphport.runtime.device.cuda_problem", lambda _: None)
    monkeypatch.setattr(opening, "device_memory", device_memory)
    bundle = open_bundle(bundles["float16"])
    with pytest.raises(DeviceError, match="CUDA device 0 cannot be used: cudaMemGetInfo failed with CUDA error 46"):
        open_graph(bundle, request(wish="cuda"), LIMITS, NO_GRAPHS, threads=1)
    assert open_graph(bundle, request(wish="auto"), LIMITS, NO_GRAPHS, threads=1).device == "cpu"
    assert "device auto: cpu (CUDA device 0 cannot be used" in caplog.text
