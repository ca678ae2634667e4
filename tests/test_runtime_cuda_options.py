"""Options of the CUDA provider: checked by name and value before anything is opened, and known to ONNX Runtime."""

import json
from pathlib import Path
from typing import Any

import cuda_stubs
import pytest
from tiny_bundles import write_tiny_bundle

from graphport.model_def.signature import GRAPH_FILE
from graphport.runtime.cuda_options import CALLER_OPTIONS, OWN_OPTIONS, checked_options


def test_b53_tf32_is_off_unless_asked_for() -> None:
    assert checked_options(None) == checked_options({}) == {"use_tf32": "0"}
    assert checked_options({"use_tf32": True, "enable_cudnn": "0"}) == {"use_tf32": "1", "enable_cudnn": "0"}


def test_values_of_every_kind_become_the_strings_that_the_provider_reads() -> None:
    given = {"use_tf32": "False", "sdpa_kernel": 3, "prefer_nhwc": 1, "cudnn_conv_algo_search": "HEURISTIC"}
    assert checked_options(given) == {
        "use_tf32": "0",
        "sdpa_kernel": "3",
        "prefer_nhwc": "1",
        "cudnn_conv_algo_search": "HEURISTIC",
    }


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (
            {"use_tf23": "1"},
            ValueError,
            r"CUDA of ONNX Runtime [\d.]+ has no provider option 'use_tf23'; did you mean u",
        ),
        ({"gpu_mem_limt": 1}, ValueError, "no provider option 'gpu_mem_limt'; did you mean gpu_mem_limit"),
        ({"qqqq": 1}, ValueError, "no provider option 'qqqq'; choose one of cudnn_conv1d_pad_to_nc1d, .*use_tf32$"),
        ({"use_tf32": "maybe"}, ValueError, "provider option use_tf32 must be 0 or 1, got 'maybe'"),
        ({"use_tf32": 2}, ValueError, "provider option use_tf32 must be 0 or 1, got 2"),
        ({"sdpa_kernel": "-1"}, ValueError, "sdpa_kernel must be a whole number from 0 to 2147483647, got '-1'"),
        ({"sdpa_kernel": True}, ValueError, "sdpa_kernel must be a whole number from 0 to 2147483647, got True"),
        ({"sdpa_kernel": 2**31}, ValueError, "sdpa_kernel must be a whole number from 0"),
        ({"cudnn_conv_algo_search": "BEST"}, ValueError, "must be one of EXHAUSTIVE, HEURISTIC, DEFAULT, got 'BEST'"),
        ({"use_tf32": 1.0}, TypeError, r"use_tf32 must be str, int or bool, got 1.0 \(float\)"),
        ({1: "1"}, TypeError, r"provider_options must have str names, got 1 \(int\)"),
        (["use_tf32"], TypeError, "provider_options must be a dict of names and values, got list"),
        ({"device_id": 1}, ValueError, r"provider option device_id is not for callers: give load\(device_id=...\)"),
        (
            {"gpu_mem_limit": 1},
            ValueError,
            "gpu_mem_limit is not for callers: .* lower max_batch, max_length or prefill",
        ),
    ],
)
def test_what_is_no_option_or_no_value_is_refused_in_one_line(given: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match) as raised:
        checked_options(given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", OWN_OPTIONS)
def test_every_option_that_graphport_sets_itself_names_what_to_do_instead(name: str) -> None:
    with pytest.raises(ValueError, match=f"provider option {name} is not for callers: \\w+"):
        checked_options({name: "1"})


def test_the_options_known_are_those_of_the_installed_provider(tmp_path: Path, stubs: Path) -> None:
    """Each that a caller may give is taken, and each that the provider tells of is known here."""
    values = {name: kind[0] if isinstance(kind, tuple) else "1" for name, kind in CALLER_OPTIONS.items()}
    code = """
import json, sys
options = onnxruntime.SessionOptions()
providers = [("CUDAExecutionProvider", json.loads(sys.argv[2]))]
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=providers, enable_fallback=0)
print(json.dumps(session.get_provider_options()["CUDAExecutionProvider"]))
"""
    write_tiny_bundle(tmp_path, floats="float16")
    done = cuda_stubs.run_python(stubs, code, str(tmp_path / GRAPH_FILE), json.dumps(checked_options(values)))
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout)
    assert {*taken, "enable_skip_layer_norm_strict_mode"} == {*CALLER_OPTIONS, *OWN_OPTIONS}  # the one it does not echo
    assert {name: taken[name] for name in values if name in taken} == {n: v for n, v in values.items() if n in taken}
