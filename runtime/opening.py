"""Open a bundle's graph where the caller wishes: choose the device, check kernels and memory, then take it.

In: a checked bundle, a `DeviceRequest`, limits of the run. Out: an ONNX Runtime session that really runs there, and the
plan of its memory. What can be refused is refused before the session is opened. It runs nothing.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from graphport.model_def.free_memory import free_memory
from graphport.model_def.signature import BARE_GRAPH_FILE, PREPARED_FOLDER, WEIGHTS_FILE
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.cache_growth import FIRST_CAPACITY
from graphport.runtime.cuda_device import CudaError, device_memory
from graphport.runtime.cuda_libraries import note_missing_cudnn
from graphport.runtime.cuda_options import checked_options
from graphport.runtime.cuda_setup import CudaSetup
from graphport.runtime.device import (
    ORT_ERRORS,
    Device,
    DeviceError,
    DeviceRequest,
    choose_device,
    default_threads,
    open_inference_session,
)
from graphport.runtime.kernel_limits import kernel_limit, slow_products
from graphport.runtime.memory import MIB, require_memory
from graphport.runtime.memory_plan import MemoryPlan, RunLimits, longest_that_fits, most_rows_that_fit, plan_memory
from graphport.runtime.model_sizes import model_sizes
from graphport.runtime.prefill_products import FLOAT_ENTRIES, FLOAT_STEP, require_float_products, require_heeded
from graphport.runtime.prepared import Probe, find_prepared, probe_problem
from graphport.runtime.resident_memory import forget_mapped, return_freed

# Larger results of constant folding are left to be computed: a tied quantised embedding, reshaped for its second use,
# would otherwise be stored twice (an unfolded Reshape costs nothing).
_LARGEST_FOLDED_CONSTANT = 32768  # bytes

_SESSION_ENTRIES = {
    "session.record_ep_graph_assignment_info": "1",
    "optimization.constant_folding_max_output_size_in_bytes": str(_LARGEST_FOLDED_CONSTANT),
}
_CUDA_ENTRIES = {
    "session.use_device_allocator_for_initializers": "1",  # the arena rounds up to powers of two and counts its limit
    "ep.cuda.fpa_intb_gemm": "1",  # MatMulNBits orders its weights for the compact GEMM
}

_SLEEPING_ENTRIES = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}

_LOG_ERRORS = 3  # of ONNX Runtime's levels: 2 is warnings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGraph:
    """A session, where it runs, the plan of its memory, and the options that its provider took (none on the CPU).

    `is_prepared`: whether it is the graph that was packed for this processor. `prefill`: a second session with float32
    products, for the long steps of prompts, where that was asked for.
    """

    session: Any
    device: Device
    device_id: int
    plan: MemoryPlan
    provider_options: Mapping[str, str]
    is_prepared: bool = False
    prefill: Any | None = None


def open_graph(
    bundle: BundleFiles,
    request: DeviceRequest,
    limits: RunLimits,
    cuda: CudaSetup,
    *,
    threads: int,
    on_checked: Callable[[], None] = lambda: None,
) -> OpenedGraph:
    """Open the graph of `bundle` on the device that `request` names, for runs within `limits`.

    On CUDA it runs on the stream of `cuda`, and captures graphs if that says so and ONNX Runtime agrees. `on_checked`
    is called once what is done in Python is done, before ONNX Runtime opens the graph.

    Raises DeviceError, NotEnoughMemoryError, and ValueError for options and for a graph that ONNX Runtime refuses.
    """
    options = checked_options(request.provider_options)
    device, reason = choose_device(request, target=bundle.manifest.target)
    has_floats = request.prefill_products == "float32"
    if has_floats:
        require_float_products(bundle, device, prefill_chunk=limits.prefill_chunk, max_length=limits.max_length)
        require_heeded(FLOAT_ENTRIES)
    if device == "cuda":
        on_checked()
        try:
            return _open_on_cuda(bundle, request, options, limits, cuda, threads=threads)
        except DeviceError as error:
            if request.wish != "auto":
                raise
            reason = str(error)
    request.require_plain(reason)
    _require_cpu_kernels(bundle, reason)
    if request.wish == "auto":
        level = logging.WARNING if bundle.manifest.target == "cuda" else logging.INFO
        _log.log(level, "device auto: cpu (%s)", reason)
    plan = _checked_plan(bundle, "cpu", limits, free_memory(), name="the CPU", float_products=has_floats)
    entries = {} if request.spinning else _SLEEPING_ENTRIES
    found = _find_prepared(bundle) if request.prepared else None
    on_checked()
    packed = _open_prepared(bundle, *found, threads=threads, entries=entries) if found else None
    session = packed or _open(bundle, "cpu", {}, threads=threads, entries=entries)
    return OpenedGraph(
        session=session,
        device="cpu",
        device_id=0,
        plan=plan,
        provider_options={},
        is_prepared=packed is not None,
        prefill=_open_float_products(bundle, threads=threads, entries=entries) if has_floats else None,
    )


def _open_float_products(bundle: BundleFiles, *, threads: int, entries: Mapping[str, str]) -> Any:  # noqa: ANN401 - ORT is untyped
    """The bundle's graph once more, its 4-bit products with float32 activations; other weights are the same pages."""
    session = _open(bundle, "cpu", {}, threads=threads, entries={**entries, **FLOAT_ENTRIES})
    forget_mapped(bundle.graph.with_name(bundle.weights))
    return_freed()
    _log.info("%s: steps of %d prompt tokens and more have float32 products", bundle.folder, FLOAT_STEP)
    return session


def _find_prepared(bundle: BundleFiles) -> tuple[Path, Probe] | None:
    """The graph packed for this processor and its probe; where there is none None, and a log line."""
    if bundle.manifest.target != "cpu" or bundle.manifest.kind != "decoder":
        return None
    found = find_prepared(bundle)
    if isinstance(found, str):
        would_gain = BARE_GRAPH_FILE in bundle.manifest.files or (bundle.folder / PREPARED_FOLDER).exists()
        _log.log(logging.INFO if would_gain else logging.DEBUG, "%s runs as exported: %s", bundle.folder, found)
        return None
    return found


def _open_prepared(bundle: BundleFiles, graph: Path, probe: Probe, *, threads: int, entries: Mapping[str, str]) -> Any:  # noqa: ANN401 - ORT is untyped
    """The graph packed for this processor if it computes what it did; else None, and a log line."""
    try:
        session = cpu_session(graph, threads=threads, entries=entries)
        forget_mapped(graph.with_name(WEIGHTS_FILE))
        return_freed()
        problem = probe_problem(session, probe)
    except ORT_ERRORS as error:
        problem = " ".join(str(error).split())
    if problem is None:
        return session
    _log.warning(
        "%s runs as exported, not as prepared for this processor: %s; `graphport prepare %s` makes it anew",
        bundle.folder,
        problem,
        bundle.folder,
    )
    return None


def cpu_session(
    graph: Path, *, threads: int | None = None, entries: Mapping[str, str] | None = None, save_to: Path | None = None
) -> Any:  # noqa: ANN401 - ORT is untyped
    """An ONNX Runtime session on the CPU; `save_to` receives the optimised graph. Raises ONNX Runtime's errors."""
    options = _session_options(default_threads() if threads is None else threads, entries or {})
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
    return open_inference_session(graph, options, "cpu", {})


def _open_on_cuda(
    bundle: BundleFiles,
    request: DeviceRequest,
    options: Mapping[str, str],
    limits: RunLimits,
    cuda: CudaSetup,
    *,
    threads: int,
) -> OpenedGraph:
    device_id = request.device_id
    limit = kernel_limit(bundle.header, bundle.manifest.cache_dtype, "cuda")
    if limit is not None:
        raise DeviceError(f"{bundle.folder} cannot run on CUDA: {limit}; export it with --target cuda")
    with _errors_of(device_id):
        free = device_memory(device_id).free
    plan = _checked_plan(bundle, "cuda", limits, free, name=f"CUDA device {device_id}")
    # Blocks that double are used again. Blocks of the very size asked for are not, when prompts grow: 900 MiB where
    # 130 do, measured on 512 prompts of 1 to 512 tokens (SmolLM2-135M).
    own = {"gpu_mem_limit": str(plan.arena_limit), "arena_extend_strategy": "kNextPowerOfTwo"}
    if device_id:  # its default is 0, and ONNX Runtime 1.31 warns of any that is given
        own["device_id"] = str(device_id)
    with _errors_of(device_id):
        entries = {**_CUDA_ENTRIES, **({} if request.spinning else _SLEEPING_ENTRIES)}
        session = _open_for_capture(bundle, {**options, **own}, cuda, threads=threads, entries=entries)
    note_missing_cudnn()
    taken = session.get_provider_options()["CUDAExecutionProvider"]
    _log.info(
        "CUDA device %d: TF32 %s, memory planned: %s MiB, arena at most %.1f MiB",
        device_id,
        "on, as asked for" if taken["use_tf32"] == "1" else "off",
        plan.parts(),
        plan.arena_limit / MIB,
    )
    return OpenedGraph(session=session, device="cuda", device_id=device_id, plan=plan, provider_options=taken)


def _open_for_capture(
    bundle: BundleFiles, options: Mapping[str, str], cuda: CudaSetup, *, threads: int, entries: Mapping[str, str]
) -> Any:  # noqa: ANN401 - ORT is untyped
    """Open with capture of graphs, or without it where ONNX Runtime refuses (`cuda` keeps the reason)."""
    try:
        return _open(bundle, "cuda", {**options, **cuda.provider_options()}, threads=threads, entries=entries)
    except (DeviceError, ValueError) as error:
        if not cuda.refuse(error.__cause__ or error):
            raise
    return _open(bundle, "cuda", {**options, **cuda.provider_options()}, threads=threads, entries=entries)


@contextlib.contextmanager
def _errors_of(device_id: int) -> Iterator[None]:
    """What the CUDA runtime fails with makes the device unusable."""
    try:
        yield
    except CudaError as error:
        raise DeviceError(f"CUDA device {device_id} cannot be used: {error}; use device='cpu'") from error


def _require_cpu_kernels(bundle: BundleFiles, reason: str) -> None:
    """Raise DeviceError for a graph that the CPU, taken because of `reason`, cannot run."""
    limit = kernel_limit(bundle.header, bundle.manifest.cache_dtype, "cpu")
    if limit is not None:
        cuda = f"CUDA cannot be used: {reason}" if reason else "use device='cuda'"
        raise DeviceError(
            f"{bundle.folder} cannot run on the CPU: {limit}; export it for the CPU with "
            f"`graphport export SOURCE OUT --target cpu`, or run it on a GPU ({cuda})"
        )
    if (slow := slow_products(bundle.header)) is not None:
        _log.warning("%s: %s; export with --accuracy-level 4 for speed", bundle.folder, slow)


def _checked_plan(
    bundle: BundleFiles, device: Device, limits: RunLimits, free: int, *, name: str, float_products: bool = False
) -> MemoryPlan:
    """The plan for `limits`; refused unless the weights, one small step and its cache fit into `free` bytes."""
    sizes = model_sizes(bundle, device, compact_gemm=device == "cuda", float_products=float_products)
    without = ", give prefill_products='as_exported'" if float_products else ""
    length = min(FIRST_CAPACITY, limits.max_length)
    least = plan_memory(sizes, RunLimits(max_batch=1, max_length=length, prefill_chunk=limits.prefill_chunk))
    require_memory(
        least.total,
        free,
        what=f"opening {bundle.folder} on {name} for one row of {length} tokens ({least.parts()} MiB)",
        advice=f"no context fits; free memory there{without}, or export with a smaller precision",
    )
    plan = plan_memory(sizes, limits)
    if plan.total > free:
        _log.info(
            "%s has %.1f MiB free, %d rows of %d tokens need %.1f: up to %d tokens a row fit, or %d rows",
            name,
            free / MIB,
            limits.max_batch,
            limits.max_length,
            plan.total / MIB,
            longest_that_fits(sizes, limits, free),
            most_rows_that_fit(sizes, limits, free),
        )
    return plan


def _open(
    bundle: BundleFiles,
    device: Device,
    provider_options: Mapping[str, str],
    *,
    threads: int,
    entries: Mapping[str, str],
) -> Any:  # noqa: ANN401 - ORT is untyped
    options = _session_options(threads, entries)
    try:
        return open_inference_session(bundle.graph, options, device, provider_options)
    except ORT_ERRORS as error:
        if isinstance(error, DeviceError):
            raise
        opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in bundle.header.opsets.items())
        raise ValueError(
            f"ONNX Runtime {onnxruntime.__version__} cannot open {bundle.graph} (IR version "
            f"{bundle.header.ir_version}; opsets {opsets}): {error}. Export the bundle again with this version"
        ) from error


def _session_options(threads: int, entries: Mapping[str, str]) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _LOG_ERRORS  # it warns of every constant that it was told not to fold
    for key, value in {**_SESSION_ENTRIES, **entries}.items():
        options.add_session_config_entry(key, value)
    return options
