"""One decoder graph on ONNX Runtime: opened, checked against its manifest, and run one step at a time.

In: a checked bundle, token ids and a KVCache. Out: logits of the rows asked for, with the cache appended in place.
It chooses no tokens, schedules nothing, and is not thread-safe. Legend: B rows, S new tokens a row, R logits rows.
"""

import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.free_memory import free_memory
from graphport.model_def.signature import DType, source_specs
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.cache_buffer import CudaBuffer, HostBuffer
from graphport.runtime.cuda_device import device_memory
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.cuda_setup import CudaSetup, GraphWish
from graphport.runtime.decode_graphs import padded_batch
from graphport.runtime.device import (
    Device,
    DeviceError,
    DeviceRequest,
    DeviceWish,
    PrefillProducts,
    default_threads,
)
from graphport.runtime.device_memory import CudaMemory, DeviceMemory, HostMemory
from graphport.runtime.dlpack import DeviceIds, SupportsDlpack, take_ids
from graphport.runtime.graph_checks import check_config, check_placement, check_signature, node_placement
from graphport.runtime.kernel_limits import has_int8_activations
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.limits import checked_count
from graphport.runtime.memory import cache_specs
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.opening import open_graph
from graphport.runtime.prefill_products import FLOAT_STEP
from graphport.runtime.runners import CpuRunner, CudaRunner, Runner
from graphport.runtime.source_rows import SourceRows
from graphport.runtime.source_session import SourceSession
from graphport.runtime.step_outputs import StepOutputs
from graphport.runtime.step_tensors import StepShape, StepTensors

QUANTISED_CACHES: tuple[DType, ...] = ("int8", "uint8", "float8e4m3fn")

_THREADS_PER_PROCESSOR = 4  # at most

_log = logging.getLogger(__name__)


class Session:
    """An open decoder graph.

    Attributes: `device` and `device_id`, where it runs; `provider_options`, those that CUDA took; `memory_plan`, for
    runs within the limits given; `is_prepared`, whether it is the graph packed for this processor; `prefill_products`,
    what those of long steps are; `threads`; `vocab_size`; `placement`, number of nodes by (provider, op type).
    """

    def __init__(
        self,
        bundle: BundleFiles,
        *,
        device: DeviceWish = "auto",
        device_id: int = 0,
        provider_options: Mapping[str, OptionValue] | None = None,
        limits: RunLimits | None = None,
        threads: int | None = None,
        cuda_graphs: GraphWish = "auto",
        stream: int | None = None,
        prepared: bool = True,
        spinning: bool = True,
        prefill_products: PrefillProducts = "as_exported",
        on_checked: Callable[[], None] = lambda: None,
    ) -> None:
        """See `load`. Raises DeviceError, NotEnoughMemoryError, ValueError, TypeError.

        `limits` are what memory is planned for: by default one row of the bundle's longest text, in one piece.
        `on_checked`: see `open_graph`.
        """
        self.threads = default_threads() if threads is None else checked_threads(threads)
        longest = bundle.manifest.max_length
        limits = limits or RunLimits(max_batch=1, max_length=longest, prefill_chunk=longest)
        request = DeviceRequest(
            wish=device,
            device_id=device_id,
            provider_options=provider_options,
            prepared=prepared,
            spinning=spinning,
            prefill_products=prefill_products,
        )
        cuda = CudaSetup(cuda_graphs=cuda_graphs, stream=stream, device_id=request.device_id)
        opened = open_graph(bundle, request, limits, cuda, threads=self.threads, on_checked=on_checked)
        self._session, self.device, self.device_id = opened.session, opened.device, opened.device_id
        self.provider_options, self.memory_plan = opened.provider_options, opened.plan
        self.is_prepared, self.prefill_products = opened.is_prepared, prefill_products
        self._prefill = opened.prefill
        self.manifest = bundle.manifest
        self.vocab_size = bundle.manifest.config.vocab_size
        self.placement = node_placement(self._session)
        check_placement(self.placement, self.device)
        _check_wishes(cuda, self.device, self.placement)
        check_signature("input", bundle.manifest.signature.inputs, self._session.get_inputs())
        check_signature("output", bundle.manifest.signature.outputs, self._session.get_outputs())
        check_config(bundle.manifest)
        self._encoder: SourceSession | None = None
        if bundle.encoder is not None:
            self._encoder = self._open_encoder(bundle.encoder, dataclasses.replace(request, wish=self.device))
        self.cache_specs = cache_specs(bundle.manifest)
        self._rounds_activations = self.device == "cpu" and has_int8_activations(bundle.header)
        self._runner: Runner = CpuRunner(self._session) if self.device == "cpu" else CudaRunner(self._session, cuda)
        self._prefill_runner: Runner | None = None if self._prefill is None else CpuRunner(self._prefill)
        self._decode_tensors: dict[tuple[int, bool], StepTensors] = {}
        self._other_tensors: dict[tuple[bool, bool], StepTensors] = {}
        # Attributes go in the order in which they were set: the stream last, after the session that runs on it.
        self._memory: DeviceMemory = HostMemory() if self.device == "cpu" else CudaMemory(cuda.runtime)

    @property
    def cuda_graphs(self) -> bool:
        """Whether decode steps are captured as CUDA graphs and replayed."""
        return self._runner.captures

    @property
    def has_quantised_cache(self) -> bool:
        """Whether rows are rounded when they are cached."""
        return self.manifest.cache_dtype in QUANTISED_CACHES

    @property
    def depends_on_cuts(self) -> bool:
        """Whether results depend, beyond last bits, on the pieces in which a prompt is run.

        Rows of one piece see each other before a quantised cache rounds them; and where activations are rounded to 8
        bits, a difference in the last bit of one turns into another rounding of it.
        """
        return self.has_quantised_cache or self._rounds_activations

    def new_cache(self, *, max_slots: int, max_length: int, longest_step: int = 1) -> KVCache:
        """An empty cache for this graph on its device, with room for steps of `longest_step` tokens from the start."""
        new_buffer: Any = HostBuffer
        free: Callable[[], int] = free_memory
        if isinstance(self._memory, CudaMemory):
            new_buffer = functools.partial(CudaBuffer, self._memory.cuda)
            free = lambda: device_memory(self.device_id).free  # noqa: E731 - one of two ways to ask
        config, source = self.manifest.config, None
        if config.encoder is not None:
            specs = source_specs(config, self.cache_specs[0].dtype)
            longest = config.encoder.max_positions
            source = SourceRows(
                specs,
                max_slots=max_slots,
                max_length=longest,
                new_buffer=HostBuffer.cleared if new_buffer is HostBuffer else new_buffer,
                free=free,
            )
        return KVCache(
            self.cache_specs,
            max_slots=max_slots,
            max_length=max_length,
            device=self.device,
            new_buffer=new_buffer,
            free=free,
            window=self.manifest.window_rows,
            longest_step=longest_step,
            source=source,
        )

    def encode(self, cache: KVCache, slot: int, source: Sequence[int] | NDArray[np.float32]) -> None:
        """Make ids or features the source of active `slot`: the encoder runs, its keys and values are kept."""
        assert self._encoder is not None
        assert cache.source is not None
        cache.source.write(slot, self._encoder.run(source))

    def _open_encoder(self, bundle: BundleFiles, request: DeviceRequest) -> SourceSession:
        encoder = SourceSession(bundle, request, threads=self.threads)
        check_placement(node_placement(encoder.session), self.device)
        check_signature("input", bundle.manifest.signature.inputs, encoder.session.get_inputs())
        check_signature("output", bundle.manifest.signature.outputs, encoder.session.get_outputs())
        return encoder

    def step(
        self,
        cache: KVCache,
        ids: NDArray[np.int64] | SupportsDlpack,
        rows: NDArray[np.int64] | None = None,
        *,
        first_slot: int = 0,
    ) -> NDArray[np.float32]:
        """`run`, with the logits [R, vocab] on the host: a buffer that the next step overwrites."""
        return self.run(cache, ids, rows, first_slot=first_slot).logits()

    def run(
        self,
        cache: KVCache,
        ids: NDArray[np.int64] | SupportsDlpack,
        rows: NDArray[np.int64] | None = None,
        *,
        first_slot: int = 0,
    ) -> StepOutputs:
        """Append `ids` [B, S] to slots first_slot .. first_slot+B-1 and compute the logits of R rows.

        `ids` are integers of any layout on the host, or contiguous int64 on the session's device, in anything that
        speaks DLPack. `rows` [R] are indices into the flattened [B * S] positions; None asks for the last position of
        each row. Rows may differ in length when S is 1; several new tokens a row need B = 1 (GroupQueryAttention's
        rule). With float32 `prefill_products` steps of 96 tokens and more have these. The outputs are complete, and the
        next step overwrites them. The slots must be active. If a step fails, their lengths stay.
        """
        taken = take_ids(ids, self._memory)
        batch, length = taken.shape
        if length > 1 and batch > 1:
            raise ValueError(f"a step of {length} tokens takes one row at a time, got {batch}")
        if not 0 <= first_slot <= first_slot + batch <= cache.num_active:
            raise ValueError(f"slots {first_slot} to {first_slot + batch - 1} are not active; {cache.num_active} are")
        is_decode = length == 1 and rows is None
        size = self._captured_batch(cache, first_slot, batch) if is_decode else None
        outputs = self._run(cache, taken, rows, first_slot, is_decode=is_decode, captured=size)
        cache.advance(first_slot, batch, length)
        return outputs

    def _captured_batch(self, cache: KVCache, first_slot: int, batch: int) -> int | None:
        """Rows of the captured graph that runs `batch` rows, or None: then the step runs as it is.

        A graph exists for powers of two and for the cache's limit. The rows that fill it up write into slots that
        nobody has claimed, so a slot in prefill among them rules it out; a slot claimed later starts empty anyway.
        """
        size = padded_batch(batch, cache.max_slots)
        fits = first_slot == 0 and batch in (size, cache.num_active)
        return size if self._runner.captures and fits else None

    def _run(
        self,
        cache: KVCache,
        ids: NDArray[np.int64] | DeviceIds,
        rows: NDArray[np.int64] | None,
        first_slot: int,
        *,
        is_decode: bool,
        captured: int | None,
    ) -> StepOutputs:
        batch, length = ids.shape
        size = captured or batch
        before = cache.lengths[first_slot : first_slot + batch]
        longest = int(before.max()) + length
        cache.reserve(first_slot + size, longest, num_new=length)
        cache.drop_rows(first_slot, batch)
        seqlens = np.zeros(size, np.int32)
        seqlens[:batch] = before + (length - 1)
        if rows is None:
            rows = np.arange(length - 1, size * length, length)
        shape = StepShape(batch=size, length=length, num_rows=len(rows))
        prefill = self._prefill_runner if length >= FLOAT_STEP else None
        tensors = self._tensors(
            shape, is_decode=is_decode, is_captured=captured is not None, is_prefill=prefill is not None
        )
        flat = ids if isinstance(ids, DeviceIds) else ids.reshape(-1)
        total = cache.capacity if captured else longest
        tensors.write(flat, seqlens, rows, total=total, held=cache.held(first_slot, batch) + length)
        binding = tensors.bind(cache, first_slot, shape)
        (prefill or self._runner).run(binding, tensors.bound_to() if captured else None)
        if is_decode and tensors.has_samples:
            return tensors.outputs_fed_back(size, batch)
        return tensors.outputs(batch if is_decode else len(rows))

    def _tensors(self, shape: StepShape, *, is_decode: bool, is_captured: bool, is_prefill: bool) -> StepTensors:
        """Those of a decode step are kept by batch, so that captured graphs find them where they were.

        Of the others, chunks that give one row and steps that give many take turns: each kind has its own, in either
        session.
        """
        if not is_decode:
            kind = shape.num_rows > 1, is_prefill
            others = self._other_tensors.get(kind)
            if others is None or not others.room.covers(shape):
                session = self._prefill if is_prefill else self._session
                others = self._other_tensors[kind] = StepTensors(session, self._memory, self.manifest, shape)
            return others
        room = shape.batch if is_captured else padded_batch(shape.batch, sys.maxsize)
        known = self._decode_tensors.get((room, is_captured))
        if known is None:
            decoding = StepShape(batch=room, length=1, num_rows=room)
            known = StepTensors(self._session, self._memory, self.manifest, decoding)
            self._decode_tensors[room, is_captured] = known
        return known


def checked_threads(threads: int) -> int:
    """`threads`, if so many can run.

    They wait for one another in busy loops: more than the processors can hold never come to an end.
    """
    most = _THREADS_PER_PROCESSOR * (os.cpu_count() or 1)
    return checked_count("threads", threads, most=most, reason=f" ({_THREADS_PER_PROCESSOR} a processor)")


def _check_wishes(cuda: CudaSetup, device: Device, placement: Mapping[tuple[str, str], int]) -> None:
    """Raise DeviceError when graphs, or a stream, were asked for and cannot be; say it when "auto" does without."""
    if device == "cpu" and cuda.has_wishes:
        raise DeviceError("cuda_graphs=True and stream need device cuda, and this session runs on the CPU")
    if cuda.refusal is not None:
        reason = cuda.explain_refusal(placement)
        if cuda.is_required:
            raise DeviceError(f"cuda_graphs=True was asked for. {reason}; use cuda_graphs=False")
        _log.warning("%s; decode steps run without CUDA graphs", reason)
