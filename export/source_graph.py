"""The encoder's graph of an encoder-decoder: traced, compiled and written beside that of its decoder.

In: a module and the decoder's plan. Out: `encoder.onnx` with its weights, and reports. The decoder's own graph goes the
way of every model's (see `model_export.py`).
"""

import dataclasses
from pathlib import Path

import onnx_ir as ir

from graphport.export.bundle import EXTERNAL_BYTES
from graphport.export.graph_pass import CompilePlan, PassReport
from graphport.export.pipeline import compile_graph
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.model_def.signature import ENCODER_GRAPH_FILE, ENCODER_WEIGHTS_FILE, source_signature
from graphport.model_def.source_encoder import SourceEncoder
from graphport.model_def.transformer import Transformer


def trace_source(model: Transformer) -> ir.Model:
    """The exported graph of the encoder of `model`, and of the projections that its decoder reads."""
    return torch_to_onnx(SourceEncoder(model), source_signature(model.config))


def compile_source(exported: ir.Model, plan: CompilePlan) -> tuple[ir.Model, tuple[PassReport, ...]]:
    """The exported graph compiled as `plan`, which is the decoder's, has it. Raises FusionError."""
    encoder = plan.config.encoder
    assert encoder is not None
    own = dataclasses.replace(plan, config=encoder, max_length=encoder.max_positions, cache=None, cache_scales=())
    compiled = exported.clone()
    return compiled, compile_graph(compiled, own)


def write_source(model: ir.Model, folder: Path) -> None:
    """Write the graph into `folder`, every tensor once."""
    ir.save(model, folder / ENCODER_GRAPH_FILE, external_data=ENCODER_WEIGHTS_FILE, size_threshold_bytes=EXTERNAL_BYTES)
