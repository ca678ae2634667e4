"""The parity evidence of an export: eager against the exported graph, the fused graph, the graph that ships.

In: the eager module and the graphs. Out: checks. Neighbours are compared, so that a failure names its stage.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from graphport.export.bundle import write_graph
from graphport.export.calibrate_cache import cache_scales, round_rows
from graphport.export.float_loss import MeasuredLoss, WideRows
from graphport.export.graph_pass import CacheScales, CompilePlan
from graphport.export.graph_runner import GraphRunner
from graphport.export.guilty_pass import guilty_pass
from graphport.export.parity import check, compare
from graphport.export.pipeline import compile_graph
from graphport.export.plain_tokenizer import plain_tokenizer
from graphport.export.scratch import scratch_folder
from graphport.export.targets import CPU
from graphport.export.traced_models import TracedGraph
from graphport.model_def.certificate import Check
from graphport.model_def.config import TransformerConfig
from graphport.model_def.decoder_runs import NUM_IDS, num_reaching, text_length
from graphport.model_def.parity_text import PARITY_TEXT
from graphport.model_def.signature import GRAPH_FILE
from graphport.model_def.transformer import Transformer

NUM_FUSED_IDS = 256  # for the fused graph in fp32, if no window or scaling changes beyond
NUM_CHUNKED_IDS = 128
NUM_EXPORTED_IDS = 96  # the exported graph is the slow, portable one
NUM_STEPS = 16  # decoded one by one at the end
CHUNKS = (1, 7, 64)
FUSED_NAME = "the same passes in fp32"


def parity_ids(config: TransformerConfig, tokenizer_json: str | None, *, max_length: int, seed: int) -> list[int]:
    """Ids to compare on: English text where there is a tokenizer, else seeded random ids."""
    length = text_length(config, max_length)
    text = PARITY_TEXT * -(-length // NUM_IDS)
    return text_ids(text, config, tokenizer_json, length=length, seed=seed)


def text_ids(text: str, config: TransformerConfig, tokenizer_json: str | None, *, length: int, seed: int) -> list[int]:
    """The first `length` ids of `text`; random ones when there is no tokenizer or it does not fit the model."""
    ids = _encoded(text, config, tokenizer_json)
    if ids is not None and len(ids) >= length:
        return ids[:length]
    random = np.random.default_rng(seed)
    return [int(i) for i in random.integers(config.vocab_size, size=length)]


def text_origin(ids: Sequence[int], config: TransformerConfig, tokenizer_json: str | None, *, seed: int) -> str:
    """Where `ids` of `text_ids` come from, in words."""
    english = _encoded(PARITY_TEXT, config, tokenizer_json)
    is_text = english is not None and list(ids[: len(english)]) == english[: len(ids)]
    return "the shipped English text" if is_text else f"seeded random ids ({seed})"


def _encoded(text: str, config: TransformerConfig, tokenizer_json: str | None) -> list[int] | None:
    """All ids of `text`; None without a tokenizer, and for one that does not fit the model."""
    if tokenizer_json is None:
        return None
    ids: list[int] = plain_tokenizer(tokenizer_json).encode(text).ids
    return ids if max(ids, default=0) < config.vocab_size else None


def eager_logits(model: Transformer, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits [S, V] float32 of the eager module over the whole text at once."""
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([list(ids)]))[0].numpy()
    return logits


def loss_of_text(model: Transformer, ids: Sequence[int], reference: Callable[[], NDArray[np.float32]]) -> MeasuredLoss:
    """What float32 loses on `reference`, the rows of `eager_logits`; measured when it is first asked for."""

    def in_float64() -> list[WideRows]:
        return [model(torch.tensor([list(ids)]))[0].numpy()]

    return MeasuredLoss(model, reference, in_float64)


def certify_stages(
    exported: ir.Model,
    plan: CompilePlan,
    ids: Sequence[int],
    reference: NDArray[np.float32],
    *,
    folder: Path,
    observe: Callable[[str], None],
    trace: Callable[[TracedGraph, CompilePlan], None] | None = None,
    loss: MeasuredLoss | None = None,
) -> tuple[Check, ...]:
    """Check the exported graph and its fp32 compilation against eager, in scratch folders.

    A precision that keeps a GGUF file's blocks is also compiled with exact activations: the weights alone may differ.
    `trace` is shown the compilation while it is open. `loss`: what float32 loses on the rows of `reference`.
    """
    with scratch_folder(exported, beside=folder.parent) as scratch:
        observe("parity of the exported graph")
        checks = _check_exported(exported, plan, ids, reference, folder=scratch, loss=loss)
    with scratch_folder(exported, beside=folder.parent) as scratch:
        observe("parity of the fused graph")
        graph = _open_fused(exported, plan, folder=scratch)
        checks += _check_fused(graph, plan, ids, reference, loss=loss)
        if trace is not None:
            trace(graph, plan)
    checks = _blamed(checks, exported, plan, ids, reference, beside=folder.parent)
    if not plan.precision.keeps_blocks:
        return checks
    with scratch_folder(exported, beside=folder.parent) as scratch:
        observe("parity of the kept blocks")
        return checks + _check_blocks(exported, plan, ids, reference, folder=scratch, loss=loss)


def _blamed(
    checks: tuple[Check, ...],
    exported: ir.Model,
    plan: CompilePlan,
    ids: Sequence[int],
    reference: NDArray[np.float32],
    *,
    beside: Path,
) -> tuple[Check, ...]:
    """The checks; where the passes made the first that fails, it says which of them."""
    failed = next((index for index, one in enumerate(checks) if not one.passed), 0)
    if failed == 0:  # none, or the graph before all passes
        return checks
    tolerance = checks[failed].tolerance if checks[failed].name.endswith("max_abs") else None
    guilty = guilty_pass(exported, _in_fp32(plan), ids, reference, beside=beside, tolerance=tolerance)
    first = dataclasses.replace(checks[failed], detail=f"{checks[failed].detail}; {guilty}")
    return (*checks[:failed], first, *checks[failed + 1 :])


def _check_exported(
    exported: ir.Model,
    plan: CompilePlan,
    ids: Sequence[int],
    reference: NDArray[np.float32],
    *,
    folder: Path,
    loss: MeasuredLoss | None,
) -> tuple[Check, ...]:
    write_graph(exported, folder)
    head = ids[:NUM_EXPORTED_IDS]
    steps = [1] * min(4, len(head) - 1)
    found = GraphRunner(folder / GRAPH_FILE, plan.config, portable=True).logits(
        head, chunks=(len(head) - len(steps), *steps)
    )
    difference = compare(reference[: len(head)], found)
    return (check("exported", "max_abs", f"{len(head)} tokens", difference, loss=loss),)


def _open_fused(exported: ir.Model, plan: CompilePlan, *, folder: Path) -> TracedGraph:
    _write_compiled(exported, _in_fp32(plan), folder)
    return TracedGraph(FUSED_NAME, folder, plan.config, capacity=1, provider=CPU.provider, plain=True)


def _check_fused(
    graph: TracedGraph,
    plan: CompilePlan,
    ids: Sequence[int],
    reference: NDArray[np.float32],
    *,
    loss: MeasuredLoss | None,
) -> tuple[Check, ...]:
    ids = ids[: num_reaching(plan.config, NUM_FUSED_IDS)]
    some = ids[:NUM_CHUNKED_IDS]
    whole = compare(reference[: len(ids)], graph.logits(ids))
    sizes = pieces(len(some))
    chunked = compare(reference[: len(some)], graph.logits(some, chunks=sizes))
    what = f"{len(some)} tokens in {len(sizes)} chunks and steps"
    return (
        check("compiled", "max_abs", f"{len(ids)} tokens at once", whole, loss=loss),
        check("compiled", "kl", f"{len(ids)} tokens at once", whole, loss=loss),
        check("compiled", "max_abs", what, chunked, loss=loss),
    )


def _check_blocks(
    exported: ir.Model,
    plan: CompilePlan,
    ids: Sequence[int],
    reference: NDArray[np.float32],
    *,
    folder: Path,
    loss: MeasuredLoss | None,
) -> tuple[Check, ...]:
    """The GGUF file's blocks multiplied by exact activations, on the rows of the portable graph.

    Every row reads all blocks; what depends on positions is that of the fp32 compilation, held on more rows.
    """
    ids = ids[:NUM_EXPORTED_IDS]
    kept = dataclasses.replace(plan, target=CPU, precision=CPU.precision("gguf"), cache=None, accuracy_level=0)
    difference = compare(reference[: len(ids)], _compiled(exported, kept, folder, optimize=False).logits(ids))
    is_exact = all(matrix.is_exact for matrix in plan.matrices.values())
    what = f"{len(ids)} tokens, exact activations"
    if is_exact:
        return (check("exact blocks", "kl", what, difference, loss=loss),)
    return (check("blocks anew", "kl", what, difference),)


def _fused_twin(exported: ir.Model, plan: CompilePlan, folder: Path, *, optimize: bool = False) -> GraphRunner:
    """The graph with the plan's fusions in float32 with a float cache, written to `folder`, on the CPU."""
    return _compiled(exported, _in_fp32(plan), folder, optimize=optimize)


def _in_fp32(plan: CompilePlan) -> CompilePlan:
    precision = CPU.precision("fp32")
    return dataclasses.replace(plan, target=CPU, precision=precision, cache=None, accuracy_level=None, matrices={})


def _compiled(exported: ir.Model, plan: CompilePlan, folder: Path, *, optimize: bool) -> GraphRunner:
    _write_compiled(exported, plan, folder)
    return GraphRunner(folder / GRAPH_FILE, plan.config, optimize=optimize)


def _write_compiled(exported: ir.Model, plan: CompilePlan, folder: Path) -> None:
    graph = exported.clone()
    compile_graph(graph, plan)
    write_graph(graph, folder)


def check_shipped(
    plan: CompilePlan,
    num_ids: int,
    reference: NDArray[np.float32],
    found: NDArray[np.float32],
    *,
    loss: MeasuredLoss | None = None,
    rows: Sequence[int] | None = None,
) -> Check:
    """Rows [R, V] of what ships, fed `num_ids` in one piece, against eager's: exactly, all of each row.

    `rows`: their positions in the text, by default the first.
    """
    difference = compare(reference, found)
    if plan.precision.weight_bits is None:
        return check("compiled", "max_abs", f"{num_ids} tokens, as shipped", difference, loss=loss, rows=rows)
    return check(plan.precision.name, "kl", f"{num_ids} tokens at once", difference)


def calibrate_cache(
    exported: ir.Model, plan: CompilePlan, ids: Sequence[int], *, folder: Path
) -> tuple[CacheScales, ...]:
    """Scales of the plan's cache format from what the fused float32 graph caches for `ids`; uses `folder`'s parent.

    That graph and not the module: smoothing changes the size of the values. Raises TargetError.
    """
    assert plan.cache is not None
    with scratch_folder(exported, beside=folder.parent) as scratch:
        caches = _fused_twin(exported, plan, scratch).caches(ids)
    return cache_scales(caches, plan.config, plan.cache)


def certify_cache(exported: ir.Model, plan: CompilePlan, ids: Sequence[int], *, folder: Path) -> tuple[Check, ...]:
    """Compare the quantised cache of the bundle in `folder` with a float cache and the same weights.

    The first half of the text is one piece; what is compared comes after it, in chunks and steps that read rounded
    rows. What another target computes is played on the CPU: the fused float32 graph, its rows rounded when stored.
    """
    cache = plan.cache
    assert cache is not None
    first = len(ids) // 2
    chunks = (first, *pieces(len(ids) - first))
    with scratch_folder(exported, beside=folder.parent) as scratch:
        if plan.target is CPU:
            exact = _compiled(exported, dataclasses.replace(plan, cache=None), scratch, optimize=True)
            found = GraphRunner(folder / GRAPH_FILE, plan.config, optimize=True).logits(ids, chunks=chunks)
        else:
            exact = _fused_twin(exported, plan, scratch, optimize=True)
            scales = [scale for pair in plan.cache_scales for scale in pair]
            found = exact.logits(ids, chunks=chunks, store=lambda i, rows: round_rows(rows, scales[i], cache))
        wanted = exact.logits(ids, chunks=chunks)
    what = f"{len(ids) - first} tokens against a float cache"
    return (check(f"{cache.name} cache", "kl", what, compare(wanted[first:], found[first:])),)


def pieces(length: int) -> tuple[int, ...]:
    """Chunk sizes that cover `length`: the fixed ones that fit, one piece, then single steps."""
    steps = min(NUM_STEPS, length - 1)
    chunks, left = [], length - steps
    for size in CHUNKS:
        if size <= left:
            chunks.append(size)
            left -= size
    return (*chunks, *([left] if left else []), *([1] * steps))
