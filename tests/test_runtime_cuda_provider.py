"""Facts about the CUDA provider that the device loop rests on; a version that changes one of them shows here.

Recorded without a GPU: the provider runs on libraries whose kernels do nothing.
"""

import dataclasses
from pathlib import Path

import cuda_stubs
import onnx_ir as ir
import pytest
from cuda_calls import DOWN, UP, copies, names
from sampling_bundles import sampling_plan
from tiny_bundles import tiny_config
from tiny_models import tiny_configs, tiny_model

from graphport.export.append_sampling import append_sampling
from graphport.export.model_export import export
from graphport.model_def.signature import GRAPH_FILE, LOGITS, SEQLENS_K


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cuda") / "bundle"
    return export(tiny_model(tiny_configs()["grouped_query"]), out, target="cuda", precision="fp16", verify=False).path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "calls"


RAW = """
import numpy as np
from onnxruntime import InferenceSession, OrtValue, RunOptions, SessionOptions
import threading
options = SessionOptions()
options.log_severity_level = 3
provider = ("CUDAExecutionProvider", {"enable_cuda_graph": "1"})
session = InferenceSession(sys.argv[1], options, providers=[provider], enable_fallback=0)
binding, total = session.io_binding(), np.array(64, np.int32)
types = {"int64": np.int64, "int32": np.int32, "float16": np.float16, "float": np.float32}
sizes = {"batch": 1, "sequence": 1, "rows": 1, "capacity": 64}
caches = {}
for values, bind in ((session.get_inputs(), binding.bind_input), (session.get_outputs(), binding.bind_output)):
    for value in values:
        shape, dtype = [sizes.get(size, size) for size in value.shape], types[value.type[7:-1]]
        if value.name == "total_sequence_length":
            bind(value.name, "cpu", 0, dtype, shape, total.ctypes.data)
            continue
        name = value.name.replace("past_key_values", "present")  # one buffer for both
        if name not in caches:
            caches[name] = OrtValue.ortvalue_from_shape_and_type(shape, dtype, "cuda", 0)
        bind(value.name, "cuda", 0, dtype, shape, caches[name].data_ptr())

def run(name, graph):
    phase(name)
    options = RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    session.run_with_iobinding(binding, options)

run("first", 1)
run("second", 1)
run("none", -1)
session.release_captured_graph(1)
run("released", 1)
other = threading.Thread(target=run, args=("other thread", 1))
other.start()
other.join()
"""


def test_onnx_runtime_captures_as_decode_graphs_says(bundle: Path, stubs: Path, log: Path) -> None:
    """A new id runs twice as it is, is captured, and replayed once; -1 captures nothing; releasing does nothing.

    Another thread captures for itself. Runs that should not wait do not.
    """
    phases = cuda_stubs.record(RAW, str(bundle / GRAPH_FILE), stubs=stubs, log=log)
    kernels = {phase: sum(call.startswith("kernel ") for call in calls) for phase, calls in phases.items()}
    first, once = phases["first"], kernels["none"]
    begin = [call.startswith("cudaStreamBeginCapture") for call in first].index(True)
    assert sum(call.startswith("kernel ") for call in first[:begin]) == 2 * once
    assert sum(call.startswith("kernel ") for call in first[begin:]) == once
    assert names(first[-2:]) == ["cudaStreamEndCapture", "cudaGraphLaunch"]
    assert copies(first[begin:], UP) == copies(first[begin:], DOWN) == []  # the graph would hold the host's addresses
    assert names(phases["second"]) == ["cudaGraphLaunch"]
    assert kernels["none"] > 0
    assert not [call for call in phases["none"] if "Graph" in call or "Capture" in call or "Synchronize" in call]
    assert names(phases["released"]) == ["cudaGraphLaunch"]
    assert "cudaStreamBeginCapture" in names(phases["other thread"])


KERNELS = """
import numpy as np
from onnxruntime import InferenceSession, SessionOptions
options = SessionOptions()
options.log_severity_level = 3
for path in sys.argv[2:]:
    session = InferenceSession(path, options, providers=["CUDAExecutionProvider"], enable_fallback=0)
    size = session.get_inputs()[0].shape[1]
    for rows in map(int, sys.argv[1].split(",")):
        phase(f"{size} {rows}")
        session.run(None, {"x": np.zeros((rows, size), np.float32), "seqlens_k": np.zeros(rows, np.int32)})
"""


def _reductions(vocab_size: int, path: Path) -> Path:
    """Nothing but the nodes that reduce logits."""
    x, logits = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["rows", vocab_size]))
        for name in ("x", LOGITS)
    )
    lengths = ir.Value(name=SEQLENS_K, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["batch"]))
    head = ir.node("Neg", [x], outputs=[logits])
    model = ir.Model(ir.Graph([x, lengths], [logits], nodes=[head], opset_imports={"": 23}), ir_version=10)
    append_sampling(model, sampling_plan(dataclasses.replace(tiny_config(), vocab_size=vocab_size)))
    ir.save(model, path)
    return path


def test_rows_are_reduced_by_kernels_that_split_a_row_and_need_no_cudnn(stubs: Path, log: Path, tmp_path: Path) -> None:
    """There is no libcudnn here: a reduction that needs it would fail. A block a row would take a millisecond."""
    sizes = (49152, 151936, 262144)
    graphs = [str(_reductions(size, tmp_path / f"{size}.onnx")) for size in sizes]
    phases = cuda_stubs.record(KERNELS, "1,8,32", *graphs, stubs=stubs, log=log)
    for size in sizes:
        for rows in (1, 8, 32):
            launched = "\n".join(call for call in phases[f"{size} {rows}"] if call.startswith("kernel "))
            assert "hybrid_topk" in launched
            assert "RadixTopK" not in launched
            assert "arg_min_max_last_axis_cooperative_kernel" in launched
            assert "reduce_matrix_rows_kernel" in launched or "reduce_matrix_columns_kernel" in launched
