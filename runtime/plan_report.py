"""Memory of a model against what is free, as `graphport plan` shows it, before anything is taken.

In: sizes of a model and limits of a run. Out: a `PlanReport`. It opens no session and reads no weights.
"""

from dataclasses import dataclass

from graphport.model_def.config import TransformerConfig
from graphport.model_def.free_memory import free_memory
from graphport.model_def.signature import DType, decoder_signature, past_key, past_value
from graphport.model_def.window_rows import rows_of
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.cache_sizes import cache_sizes
from graphport.runtime.cuda_device import CudaError, device_memory
from graphport.runtime.device import Device, PrefillProducts
from graphport.runtime.limits import checked_count
from graphport.runtime.memory_plan import (
    MemoryPlan,
    ModelSizes,
    RunLimits,
    longest_that_fits,
    most_rows_that_fit,
    plan_memory,
)
from graphport.runtime.model_sizes import model_sizes
from graphport.runtime.prefill_products import require_float_products


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan, bytes that are free on its device (None: there is no such device here), and what of it would fit."""

    plan: MemoryPlan
    cache_dtype: DType
    free: int | None
    longest: int | None
    most_rows: int | None

    @property
    def fits(self) -> bool | None:
        """Whether all of it fits now; None where there is no such device."""
        return None if self.free is None else self.plan.total <= self.free


def report_bundle(
    bundle: BundleFiles, limits: RunLimits, *, prefill_products: PrefillProducts = "as_exported"
) -> PlanReport:
    """The report for an exported bundle, on the device that it was exported for.

    Raises ValueError for its limits, and for products that it cannot have.
    """
    checked_count("context", limits.max_length, most=bundle.manifest.max_length, reason=", the bundle's own")
    device: Device = "cuda" if bundle.manifest.target == "cuda" else "cpu"
    is_float = prefill_products == "float32"
    if is_float:
        require_float_products(bundle, device, prefill_chunk=limits.prefill_chunk, max_length=limits.max_length)
    sizes = model_sizes(bundle, device, compact_gemm=device == "cuda", float_products=is_float)
    return _report(sizes, limits)


def report_config(
    config: TransformerConfig,
    limits: RunLimits,
    *,
    device: Device,
    float_type: DType,
    cache_dtype: DType,
    weights: int,
    blocks: int,
    fused_attention: bool,
    window_layers: tuple[int, ...],
) -> PlanReport:
    """The report for a model that has not been exported; `weights` and `blocks` as in ModelSizes.

    `window_layers`: those whose caches would hold no more than their window.
    """
    specs = decoder_signature(config, cache_dtype, window_layers=window_layers).inputs
    names = {name(layer) for layer in range(config.num_layers) for name in (past_key, past_value)}
    sizes = ModelSizes(
        config=config,
        device=device,
        weights=weights,
        blocks=blocks,
        float_type=float_type,
        cache_dtype=cache_dtype,
        cache=cache_sizes([spec for spec in specs if spec.name in names], rows_of(config, window_layers)),
        fused_attention=fused_attention,
        samples=device == "cuda",
    )
    return _report(sizes, limits)


def _report(sizes: ModelSizes, limits: RunLimits) -> PlanReport:
    free = _free(sizes.device)
    return PlanReport(
        plan=plan_memory(sizes, limits),
        cache_dtype=sizes.cache_dtype,
        free=free,
        longest=None if free is None else longest_that_fits(sizes, limits, free),
        most_rows=None if free is None else most_rows_that_fit(sizes, limits, free),
    )


def _free(device: Device) -> int | None:
    if device == "cpu":
        return free_memory()
    try:
        return device_memory(0).free
    except (CudaError, OSError):  # no driver or no device on this machine: the plan is for another
        return None
