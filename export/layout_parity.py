"""A layout's graph against the bundle's own: the same to the last bit, in a prompt and the steps after it, or in texts.

In: a bundle folder with both graphs. Out: a check for the certificate. Caches grow as onnxruntime-genai and optimum let
them; it knows neither (the tests run the real ones).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.export.graph_pass import CompilePlan
from graphport.export.graph_runner import open_on_cpu
from graphport.export.layouts import ATTENTION_MASK, Layout, reads_texts
from graphport.model_def.certificate import Check
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import (
    GRAPH_FILE,
    INPUT_IDS,
    LENGTHS,
    LOGITS,
    LOGITS_ROWS,
    SEQLENS_K,
    TOKEN_TYPE_IDS,
    TOTAL_SEQUENCE_LENGTH,
    past_key,
    past_value,
    present_key,
    present_value,
    unmoved_windows,
)

_PROMPT, _STEPS = 12, 3

Arrays = dict[str, NDArray[Any]]


class GrowingRunner:
    """One session over a decoder's graph on the CPU; its caches are arrays that grow by every run."""

    def __init__(self, path: Path, config: TransformerConfig) -> None:
        self._session = open_on_cpu(path, optimize=False)
        self._names = {node.name for node in self._session.get_inputs()}
        layers = range(config.num_layers)
        attention = config.blocks[0].attention
        self._cache_shape = (attention.num_kv_heads, 0, attention.head_dim)
        self._past = [name for layer in layers for name in (past_key(layer), past_value(layer))]
        self._present = [name for layer in layers for name in (present_key(layer), present_value(layer))]

    def empty_cache(self, batch: int) -> Arrays:
        """Caches [batch, K, 0, H] by input name."""
        return {name: np.zeros((batch, *self._cache_shape), np.float32) for name in self._past}

    def run(self, inputs: Arrays, past: Arrays) -> tuple[NDArray[np.float32], Arrays]:
        """Logits as the graph gives them, and the caches after the step."""
        windows = unmoved_windows(self._names, inputs.get(SEQLENS_K), inputs.get(TOTAL_SEQUENCE_LENGTH))
        logits, *caches = self._session.run([LOGITS, *self._present], {**inputs, **windows, **past})
        return logits, dict(zip(self._past, caches, strict=True))


def layout_checks(folder: Path, layouts: Sequence[Layout], plan: CompilePlan, *, seed: int) -> tuple[Check, ...]:
    """One check a layout in `folder`."""
    check = encoder_layout_check if reads_texts(plan.config) else layout_check
    return tuple(check(folder, layout, plan.config, max_length=plan.max_length, seed=seed) for layout in layouts)


def layout_check(folder: Path, layout: Layout, config: TransformerConfig, *, max_length: int, seed: int) -> Check:
    """A prompt in one piece and tokens one by one, by both graphs; a shorter limit makes a shorter prompt."""
    steps = min(_STEPS, max_length - 1)
    prompt = min(_PROMPT, max_length - steps)
    ids = np.random.default_rng(seed).integers(config.vocab_size, size=prompt + steps)
    own = _logits(folder / GRAPH_FILE, config, ids, prompt, partial(_own_inputs, every_row=layout.every_row))
    found = _logits(folder / layout.graph_file, config, ids, prompt, masked_inputs)
    gap = np.abs(own - found)
    return Check(
        name=f"layout {layout.name}: {prompt} tokens and {steps} steps, max_abs to the bundle's graph",
        measured=float(gap.max()) if np.isfinite(gap).all() else float("inf"),
        tolerance=0.0,
    )


def encoder_layout_check(
    folder: Path, layout: Layout, config: TransformerConfig, *, max_length: int, seed: int
) -> Check:
    """Three texts of several lengths in one padded batch, by both graphs: all outputs."""
    longest = min(_PROMPT, max_length)
    lengths = np.array([longest, (longest + 1) // 2, 1], np.int32)
    random = np.random.default_rng(seed)
    ids = random.integers(config.vocab_size, size=(len(lengths), longest))
    mask = (np.arange(longest) < lengths[:, None]).astype(np.int64)
    types = random.integers(max(config.token_types, 1), size=ids.shape)
    every: Arrays = {TOKEN_TYPE_IDS: types, LENGTHS: lengths, ATTENTION_MASK: mask, LOGITS_ROWS: np.arange(ids.size)}
    gaps = [0.0]
    own, found = (_outputs(folder / name, {INPUT_IDS: ids, **every}) for name in (GRAPH_FILE, layout.graph_file))
    for mine, theirs in zip(own, found, strict=True):
        for row, length in enumerate(lengths):
            pair = [values.reshape(theirs.shape)[row] for values in (mine, theirs)]
            one, other = (values[:length] if theirs.ndim == 3 else values for values in pair)
            gap = np.abs(one - other)
            gaps.append(float(gap.max()) if np.isfinite(gap).all() else float("inf"))
    return Check(
        name=f"layout {layout.name}: {len(lengths)} texts in one padded batch, max_abs to the bundle's graph",
        measured=max(gaps),
        tolerance=0.0,
    )


def _outputs(path: Path, every: Arrays) -> list[NDArray[np.float32]]:
    """All outputs of a graph, which takes those of the inputs `every` that it has."""
    session = open_on_cpu(path, optimize=False)
    found: list[NDArray[np.float32]] = session.run(None, {node.name: every[node.name] for node in session.get_inputs()})
    return found


def masked_inputs(ids: NDArray[np.int64], total: int) -> Arrays:
    """What a layout's graph is called by for new ids [S] of one text of `total` tokens."""
    return {INPUT_IDS: ids[np.newaxis], ATTENTION_MASK: np.ones((1, total), np.int64)}


def _own_inputs(ids: NDArray[np.int64], total: int, *, every_row: bool) -> Arrays:
    return {
        INPUT_IDS: ids[np.newaxis],
        SEQLENS_K: np.array([total - 1], np.int32),
        TOTAL_SEQUENCE_LENGTH: np.array(total, np.int32),
        LOGITS_ROWS: np.arange(0 if every_row else len(ids) - 1, len(ids)),
    }


def _logits(
    path: Path,
    config: TransformerConfig,
    ids: NDArray[np.int64],
    prompt: int,
    inputs: Callable[[NDArray[np.int64], int], Arrays],
) -> NDArray[np.float32]:
    """Rows of logits as the graph gives them, [rows, V]."""
    runner = GrowingRunner(path, config)
    past, rows, begin = runner.empty_cache(1), [], 0
    for end in range(prompt, len(ids) + 1):
        logits, past = runner.run(inputs(ids[begin:end], end), past)
        rows.append(logits.reshape(-1, config.vocab_size))
        begin = end
    return np.concatenate(rows)
