"""The hand-built tiny bundle with its logits reduced in the graph, as bundles for CUDA have it, for the CPU provider.

In: a folder and weights. Out: a bundle that runs anywhere and takes the way of device-resident decoding.
"""

import dataclasses
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from tiny_bundles import TinyBundle, Weights, tiny_config, tiny_model, tiny_weights, write_tiny_bundle

from graphport.export.append_sampling import append_sampling
from graphport.export.graph_pass import CompilePlan
from graphport.export.targets import CPU, Target
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import decoder_signature

SAMPLING: Target = dataclasses.replace(CPU, samples_on_device=True)


def sampling_plan(config: TransformerConfig) -> CompilePlan:
    return CompilePlan(
        config=config, target=SAMPLING, precision=SAMPLING.precision("fp32"), max_length=config.max_positions
    )


def sampling_model(weights: Weights) -> onnx.ModelProto:
    model = ir.from_proto(tiny_model(weights))
    append_sampling(model, sampling_plan(tiny_config()))
    return ir.to_proto(model)


def write_sampling_bundle(folder: Path, *, weights: Weights | None = None, **options: Any) -> TinyBundle:
    weights = tiny_weights() if weights is None else weights
    signature = decoder_signature(tiny_config(), samples=True)
    model = sampling_model(weights)
    return write_tiny_bundle(folder, weights=weights, model=model, signature=signature, **options)
