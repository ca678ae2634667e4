"""Tiny models with windows, exported twice: with whole caches, and with what layers with a window need alone."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest
from tiny_graphs import export_decoder, make_block, make_config, make_model

from graphport.export import export, model_export
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import LearnedPosition
from graphport.model_def.transformer import Transformer

CONTEXT = 400
VOCAB = 61
IDS = [int(i) for i in np.random.default_rng(0).integers(VOCAB, size=CONTEXT)]

_FULL = make_block()
CONFIGS: dict[str, TransformerConfig] = {
    "mixed": make_config(make_block({"window": 5}), _FULL, make_block({"window": 8}), max_positions=CONTEXT),
    # rotated in nodes of their own, a window of the token itself, learned positions, a cap
    "outside": make_config(
        make_block({"window": 7, "head_dim": 24}),
        make_block({"window": 1, "softcap": 20.0}),
        position=LearnedPosition(max_positions=CONTEXT),
        max_positions=CONTEXT,
    ),
}
KINDS = [("mixed", "auto"), ("mixed", "int8"), ("outside", "int4")]


class Pair(NamedTuple):
    """One model's bundles: with whole caches, as before there were others, and with those of windows alone."""

    model: Transformer
    whole: Path
    kept: Path


@functools.cache
def _model_and_trace(name: str) -> tuple[Transformer, ir.Model]:
    model = make_model(CONFIGS[name])
    return model, export_decoder(model, max_length=CONTEXT)


def make_pair(name: str, cache: str, folder: Path) -> Pair:
    """The model called `name` with a cache of type `cache`, in `folder`; traced once a process."""
    model, trace = _model_and_trace(name)
    options: dict[str, Any] = {"precision": "fp32", "kv_cache": cache, "verify": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_export, "torch_to_onnx", lambda *_: trace)
        whole = export(model, folder / "whole", disable_passes=["window_cache"], **options)
        layouts = ("optimum",) if cache == "auto" else ()
        kept = export(model, folder / "kept", layouts=layouts, **options)
    assert (whole.fusions["window_cache"], kept.fusions["window_cache"]) == (0, 2)
    return Pair(model, whole.path, kept.path)
