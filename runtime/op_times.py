"""How long each node of a bundle's graph takes on this machine, as ONNX Runtime's profiler sees it.

In: a checked bundle. Out: microseconds a decode step, or a text or image, by node, with its op and where it ran. The
graph is the one that serves, its optimiser on; times of single nodes add up to less than a step, which also binds and
waits.
"""

import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from graphport.model_def.signature import (
    CONDITIONING,
    INPUT_IDS,
    LENGTHS,
    LOGITS,
    LOGITS_ROWS,
    PIXEL_VALUES,
    SEQLENS_K,
    TOKEN_TYPE_IDS,
    TOTAL_SEQUENCE_LENGTH,
    TensorSpec,
    past_key,
    past_value,
    present_key,
    present_value,
    unmoved_windows,
)
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.device import default_threads, open_inference_session
from graphport.runtime.memory import cache_specs

NUM_STEPS = 8
MOST_CACHED = 64

_LOG_ERRORS = 3
_NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "int8": np.int8, "uint8": np.uint8}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """One node: its name and op in the graph that runs, its provider, microseconds a run (the median)."""

    name: str
    op: str
    provider: str
    microseconds: float


def measure_ops(bundle: BundleFiles, *, threads: int | None = None) -> tuple[OpTime, ...]:
    """Times on the CPU of single tokens over a cache of up to 64, of an encoder those of one text or image.

    Raises ValueError for caches that NumPy has not, and for an encoder-decoder.
    """
    manifest = bundle.manifest
    if bundle.encoder is not None:
        raise ValueError(f"{bundle.folder} is an encoder-decoder, of which no times are taken; leave --times out")
    if manifest.kind == "recurrent_decoder":
        raise ValueError(f"{bundle.folder} is a recurrent decoder, of which no times are taken; leave --times out")
    if manifest.kind == "decoder" and manifest.cache_dtype not in _NUMPY_TYPES:
        raise ValueError(
            f"times are taken on the CPU, which has no caches of {manifest.cache_dtype}; leave --times out"
        )
    with tempfile.TemporaryDirectory(prefix="graphport-times-") as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or default_threads()
        options.log_severity_level = _LOG_ERRORS
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = open_inference_session(bundle.graph, options, "cpu", {})
        if manifest.kind == "decoder":
            _run_steps(session, bundle)
        else:
            _run_encoder(session, bundle)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return _times(events)


def _run_steps(session: Any, bundle: BundleFiles) -> None:  # noqa: ANN401 - ORT is untyped
    manifest = bundle.manifest
    capacity = min(MOST_CACHED, manifest.max_length)
    layers = range(manifest.config.num_layers)
    past = [name for i in layers for name in (past_key(i), past_value(i))]
    present = [name for i in layers for name in (present_key(i), present_value(i))]
    caches = [_empty_cache(spec, capacity) for spec in cache_specs(manifest)]
    random = np.random.default_rng(0)
    names = {spec.name for spec in manifest.signature.inputs}
    num_steps = min(NUM_STEPS, capacity - 1)
    for length, total in [(capacity - num_steps, capacity - num_steps)] + [
        (1, capacity - num_steps + step + 1) for step in range(num_steps)
    ]:
        feed = {
            INPUT_IDS: random.integers(manifest.config.vocab_size, size=(1, length)),
            SEQLENS_K: np.array([total - 1], np.int32),
            TOTAL_SEQUENCE_LENGTH: np.array(total, np.int32),
            LOGITS_ROWS: np.array([length - 1]),
            **dict(zip(past, caches, strict=True)),
        }
        feed |= unmoved_windows(names, feed[SEQLENS_K], feed[TOTAL_SEQUENCE_LENGTH])
        _, *caches = session.run([LOGITS, *present], feed)


def _run_encoder(session: Any, bundle: BundleFiles) -> None:  # noqa: ANN401 - ORT is untyped
    config, random = bundle.manifest.config, np.random.default_rng(0)
    if config.image is not None:
        size = config.image.fixed_size or config.image.native_size
        if config.image.num_tokens(*size) > bundle.manifest.max_length:
            size = config.image.patch_size
        feed: dict[str, Any] = {PIXEL_VALUES: random.standard_normal((1, config.image.channels, *size), np.float32)}
    else:
        length = min(MOST_CACHED, bundle.manifest.max_length)
        ids = random.integers(config.vocab_size, size=(1, length))
        types = {TOKEN_TYPE_IDS: np.zeros_like(ids)} if config.token_types > 1 else {}
        feed = {INPUT_IDS: ids, LENGTHS: np.array([length], np.int32), **types}
        if config.conditioned:
            feed[CONDITIONING] = random.standard_normal((1, config.hidden_size), np.float32)
    for _ in range(1 + NUM_STEPS):
        session.run(None, feed)


def _empty_cache(spec: TensorSpec, capacity: int) -> Any:  # noqa: ANN401 - arrays of several types
    heads, width = (size for size in spec.shape if isinstance(size, int))
    return np.zeros((1, heads, capacity, width), _NUMPY_TYPES[spec.dtype])


def _times(events: list[dict[str, Any]]) -> tuple[OpTime, ...]:
    """The median over the runs but the first, which is the prompt."""
    durations: dict[str, list[float]] = defaultdict(list)
    kinds: dict[str, tuple[str, str]] = {}
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            node = name.removesuffix("_kernel_time")
            durations[node].append(float(event["dur"]))
            kinds[node] = (str(event["args"].get("op_name")), str(event["args"].get("provider")))
    return tuple(
        OpTime(
            name=node,
            op=kinds[node][0],
            provider=kinds[node][1],
            microseconds=float(np.median(values[1:] or values)),
        )
        for node, values in durations.items()
    )
