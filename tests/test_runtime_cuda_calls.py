"""The CUDA calls of decoding, recorded without a GPU: the real provider on libraries whose kernels do nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import cuda_stubs
import onnx_ir as ir
import pytest
from cuda_calls import DOWN, ON_DEVICE, UP, copies, names
from tiny_models import tiny_configs, tiny_model

from graphport.export.model_export import export
from graphport.model_def.signature import GRAPH_FILE, LOGITS, MANIFEST_FILE, TOTAL_SEQUENCE_LENGTH

STEPS = 10

# Decodes argv[3] prompts of the bundle argv[1], whose kernels leave every logit 0; counts from when all of them decode.
DECODE = f"""
import json
from graphport.runtime import SamplingParams, load
options, params = json.loads(sys.argv[2]), json.loads(sys.argv[4])
phase("load")
lm = load(sys.argv[1], device="cuda", max_batch=4, max_length=64, **options)
streams = [lm.stream([1, 2, 3 + i], SamplingParams(ignore_eos=True, **params)) for i in range(int(sys.argv[3]))]
phase("prefill")
for stream in streams:
    next(stream)
for _ in range(5):
    lm._engine.step()
phase("steady")
for _ in range({STEPS}):
    lm._engine.step()
phase("end")
assert lm.device == "cuda"
assert lm.cuda_graphs is options.get("cuda_graphs", True)
"""

GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cuda") / "bundle"
    return export(tiny_model(tiny_configs()["grouped_query"]), out, target="cuda", precision="fp16", verify=False).path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "calls"


def decoded(
    bundle: Path, stubs: Path, log: Path, *, batch: int = 1, params: dict[str, Any] = GREEDY, **options: Any
) -> dict[str, list[str]]:
    arguments = (str(bundle), json.dumps(options), str(batch), json.dumps(params))
    return cuda_stubs.record(DECODE, *arguments, stubs=stubs, log=log)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_greedy_step_is_one_graph_and_one_id_a_row(batch: int, bundle: Path, stubs: Path, log: Path) -> None:
    steady = decoded(bundle, stubs, log, batch=batch)["steady"]
    assert names(steady) == ["cudaGraphLaunch", *["cudaMemcpyAsync"] * 4, "cudaStreamSynchronize"] * STEPS
    assert copies(steady, UP) == []
    assert copies(steady, ON_DEVICE) == [8 * batch, 4 * batch] * STEPS
    assert copies(steady, DOWN) == [8 * batch, 4 * batch] * STEPS


def test_everything_runs_on_one_stream(bundle: Path, stubs: Path, log: Path) -> None:
    """That of the graphs, which waits for the legacy default stream; nothing runs on the default stream itself."""
    phases = decoded(bundle, stubs, log)
    (created,) = [call.split()[1] for call in phases["load"] if call.startswith("cudaStreamCreate ")]
    calls = [call.split() for call in (*phases["prefill"], *phases["steady"])]
    used = {words[-1] for words in calls if words[0] in ("cudaMemcpyAsync", "cudaGraphLaunch", "cudaStreamSynchronize")}
    assert used == {created}
    assert not [words for words in calls if words[0] in ("cudaMemcpy", "cudaDeviceSynchronize")]


def test_a_batch_of_three_replays_the_graph_of_four(bundle: Path, stubs: Path, log: Path) -> None:
    steady = decoded(bundle, stubs, log, batch=3)["steady"]
    assert names(steady).count("cudaGraphLaunch") == STEPS
    assert copies(steady, UP) == []
    assert copies(steady, ON_DEVICE) == [8 * 4, 4 * 4] * STEPS
    assert copies(steady, DOWN) == [8 * 3, 4 * 3] * STEPS


def test_without_graphs_a_step_launches_its_kernels_and_moves_no_more(bundle: Path, stubs: Path, log: Path) -> None:
    phases = decoded(bundle, stubs, log, batch=2, cuda_graphs=False)
    assert not [call for calls in phases.values() for call in calls if "Capture" in call or "Graph" in call]
    steady = phases["steady"]
    assert names(steady) == ["kernels", *["cudaMemcpyAsync"] * 4, "cudaStreamSynchronize"] * STEPS
    assert copies(steady, UP) == []
    assert copies(steady, ON_DEVICE) == [8 * 2, 4 * 2] * STEPS
    assert copies(steady, DOWN) == [8 * 2, 4 * 2] * STEPS


def test_growing_past_the_capacity_captures_again(bundle: Path, stubs: Path, log: Path) -> None:
    """max_length is 64 here, so it is rows that grow: each batch size has its graph, captured once."""
    phases = decoded(bundle, stubs, log, batch=4)
    captures = [call for calls in phases.values() for call in calls if call.startswith("cudaStreamBeginCapture")]
    assert 1 <= len(captures) <= 4
    assert not [call for call in phases["steady"] if "Capture" in call]


OWN_STREAM = """
import ctypes
stream = ctypes.c_void_p()
ctypes.CDLL("libcudart.so.13").cudaStreamCreateWithFlags(ctypes.byref(stream), 1)
sys.argv[2] = sys.argv[2].replace("4242", str(stream.value))
"""


def test_the_callers_stream_is_used_for_everything(bundle: Path, stubs: Path, log: Path) -> None:
    arguments = (str(bundle), json.dumps({"stream": 4242}), "1", json.dumps(GREEDY))
    phases = cuda_stubs.record(OWN_STREAM + DECODE, *arguments, stubs=stubs, log=log)
    (given,) = [call.split()[1] for call in phases[""]]
    assert not [call for call in phases["load"] if call.startswith("cudaStreamCreate ")]
    steady = [call.split() for call in phases["steady"]]
    assert {words[-1] for words in steady} == {given}


TWO_THREADS = """
import threading
from graphport.runtime import SamplingParams, load
phase("load")
lm = load(sys.argv[1], device="cuda", max_batch=4, max_length=64, cuda_graphs=True)
params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
phase("run")
threads = [threading.Thread(target=lm.generate, args=([[1, 2, 3 + i]], params)) for i in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
phase("after")
lm.generate([[1, 2, 3]], params)
"""


def test_b97_threads_share_one_context_and_its_graphs(bundle: Path, stubs: Path, log: Path) -> None:
    """Each thread that runs a session with graphs would keep a context of its own: here there are two at most."""
    phases = cuda_stubs.record(TWO_THREADS, str(bundle), stubs=stubs, log=log)
    assert 1 <= names(phases["run"]).count("cublasCreate") <= 2
    assert "cublasCreate" not in phases["after"]
    assert "cudaGraphLaunch" in names(phases["after"])


def _with_control_flow(bundle: Path, out: Path) -> Path:
    """The bundle with an If between its logits and the rest, which no graph can hold."""
    shutil.copytree(bundle, out)
    model = ir.load(out / GRAPH_FILE)
    logits = next(value for value in model.graph.outputs if value.name == LOGITS)
    total = next(value for value in model.graph.inputs if value.name == TOTAL_SEQUENCE_LENGTH)
    readers = logits.uses()
    same = ir.node("Equal", [total, total])
    branches = {}
    for name in ("then_branch", "else_branch"):
        copy = ir.node("Identity", [logits])
        copy.outputs[0].name, copy.outputs[0].type, copy.outputs[0].shape = name, logits.type, logits.shape
        branches[name] = ir.AttrGraph(name, ir.Graph([], copy.outputs, nodes=[copy], name=name))
    choice = ir.node("If", same.outputs, branches)
    choice.outputs[0].type, choice.outputs[0].shape = logits.type, logits.shape
    model.graph.insert_after(logits.producer(), [same, choice])
    for node, index in readers:
        node.replace_input_with(index, choice.outputs[0])
    model.graph.outputs[list(model.graph.outputs).index(logits)] = choice.outputs[0]
    logits.name, choice.outputs[0].name = "plain_logits", LOGITS
    ir.save(model, out / GRAPH_FILE)  # the weights stay where they are
    manifest = json.loads((out / MANIFEST_FILE).read_text())
    manifest["files"][GRAPH_FILE]["size"] = (out / GRAPH_FILE).stat().st_size
    (out / MANIFEST_FILE).write_text(json.dumps(manifest))
    return out


REFUSED = """
import json, logging
from graphport.runtime import SamplingParams, load
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("graphport").addHandler(handler)
try:
    load(sys.argv[1], device="cuda", max_length=64, cuda_graphs=True)
except RuntimeError as error:
    assert "ONNX Runtime does not capture this graph: it has 1 x If; use cuda_graphs=False" in str(error), error
else:
    raise AssertionError("capture was asked for and not refused")
assert said == [], said
with load(sys.argv[1], device="cuda", max_length=64) as lm:
    assert lm.cuda_graphs is False
    (line,) = said
    assert "it has 1 x If; decode steps run without CUDA graphs" in line, line
    phase("run")
    lm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5, temperature=0.0, ignore_eos=True))
"""


def test_a_graph_that_cannot_be_captured_is_refused_by_node_or_runs_without_and_says_so(
    bundle: Path, stubs: Path, log: Path, tmp_path: Path
) -> None:
    phases = cuda_stubs.record(REFUSED, str(_with_control_flow(bundle, tmp_path / "if")), stubs=stubs, log=log)
    assert "kernels" in names(phases["run"])
    assert not [call for call in phases["run"] if "Graph" in call or "Capture" in call]


FAILS = """
import logging
from graphport.runtime import SamplingParams, load
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("graphport").addHandler(handler)
params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
with load(sys.argv[1], device="cuda", max_length=64, cuda_graphs=True) as lm:
    try:
        lm.generate([[1, 2, 3]], params)
    except RuntimeError as error:
        assert "cuda_graphs=True was asked for, and capturing a decode step failed: " in str(error), error
        assert str(error).endswith("; use cuda_graphs=False"), error
    else:
        raise AssertionError("capture was asked for, and its failure went unsaid")
assert said == [], said
with load(sys.argv[1], device="cuda", max_length=64) as lm:
    assert lm.cuda_graphs is True
    phase("run")
    assert len(lm.generate([[1, 2, 3]], params)[0].token_ids) == 8
    assert lm.cuda_graphs is False
    (line,) = said
    assert "capturing a decode step failed: " in line, line
    assert line.endswith("; decode steps run without CUDA graphs from here on"), line
    phase("again")
    lm.generate([[1, 2, 3]], params)
    assert len(said) == 1, said
"""


def test_a_capture_that_fails_while_it_runs_is_an_error_or_the_end_of_capturing(
    bundle: Path, stubs: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_STUB_FAILS_CAPTURE", "1")
    phases = cuda_stubs.record(FAILS, str(bundle), stubs=stubs, log=log)
    assert names(phases["run"]).count("cudaStreamBeginCapture") == 1
    assert "kernels" in names(phases["again"])
    assert not [call for call in phases["again"] if "Graph" in call or "Capture" in call]


CLOSE = """
import gc
from graphport.runtime import SamplingParams, load
lm = load(sys.argv[1], device="cuda", max_batch=4, max_length=64)
lm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True))
phase("close")
lm.close()
del lm
gc.collect()
phase("end")
"""


def test_b97_closing_gives_all_device_memory_back_and_the_stream_last(bundle: Path, stubs: Path, log: Path) -> None:
    phases = cuda_stubs.record(CLOSE, str(bundle), stubs=stubs, log=log)
    calls = names([call for calls in phases.values() for call in calls])
    assert calls.count("cudaMalloc") == calls.count("cudaFree") > 0
    assert phases["close"][-1] == "cudaStreamDestroy"
    assert phases["end"] == []
