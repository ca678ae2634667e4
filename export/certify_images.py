"""The parity evidence of an image encoder: eager on each image alone against the graphs on batches of every size.

In: the eager module and the graphs. Out: checks. Neighbours are compared as in `certify.py`, so a failure names its
stage; what differs is what is run: seeded images of several sizes.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor

from graphport.export.bundle import write_graph
from graphport.export.encoder_parity import check_states, compare_states
from graphport.export.encoder_runner import States
from graphport.export.graph_pass import CompilePlan
from graphport.export.graph_runner import open_on_cpu
from graphport.export.parity_images import parity_images
from graphport.export.pipeline import compile_graph
from graphport.export.targets import CPU
from graphport.model_def.certificate import Check
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import GRAPH_FILE, HIDDEN_STATES, PIXEL_VALUES
from graphport.model_def.transformer import Transformer


class ImageEvidence:
    """Images to compare on, and the checks of each stage; without a model those that need no reference."""

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer_json: str | None,  # noqa: ARG002 - of every kind's evidence
        *,
        max_length: int,
        seed: int,
        model: Transformer | None = None,
    ) -> None:
        assert config.image is not None
        self._batches = parity_images(config.image, max_length=max_length, seed=seed)
        self._model = model

    @functools.cached_property
    def reference(self) -> States:
        """What the eager module gives for each image alone."""
        assert self._model is not None
        return eager_image_states(self._model, one_by_one(self._batches))

    def certify_stages(
        self, exported: ir.Model, plan: CompilePlan, *, folder: Path, observe: Callable[[str], None]
    ) -> tuple[Check, ...]:
        """Check the exported graph and its fp32 compilation; writes and removes both under `folder`'s parent."""
        observe("running eager PyTorch")
        reference, what = self.reference, self._what
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".parity.") as name:
            observe("parity of the exported graph")
            write_graph(exported, Path(name))
            found = image_states(Path(name) / GRAPH_FILE, self._batches)
            checks = (check_states("exported", "relative", what, compare_states(reference, found)),)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".parity.") as name:
            observe("parity of the fused graph")
            twin = exported.clone()
            compile_graph(
                twin, dataclasses.replace(plan, target=CPU, precision=CPU.precision("fp32"), accuracy_level=None)
            )
            write_graph(twin, Path(name))
            found = image_states(Path(name) / GRAPH_FILE, self._batches)
            return (*checks, check_states("compiled", "relative", what, compare_states(reference, found)))

    def certify_bundle(
        self,
        exported: ir.Model,  # noqa: ARG002 - of every kind's evidence
        plan: CompilePlan,
        *,
        folder: Path,
        observe: Callable[[str], None],
    ) -> tuple[Check, ...]:
        """Check what ships in `folder` where the CPU runs it."""
        if plan.target is not CPU:
            return ()
        observe("parity of the bundle")
        return (*self.certify_shipped(plan, folder=folder), *self.certify_alone(plan, folder=folder))

    def certify_shipped(self, plan: CompilePlan, *, folder: Path) -> tuple[Check, ...]:
        """Check the graph in `folder` against eager."""
        found = image_states(folder / GRAPH_FILE, self._batches, optimize=True)
        is_float = plan.precision.weight_bits is None
        stage, figure = ("compiled", "relative") if is_float else (plan.precision.name, "cosine")
        return (check_states(stage, figure, f"{self._what}, as shipped", compare_states(self.reference, found)),)

    def certify_alone(self, plan: CompilePlan, *, folder: Path) -> tuple[Check, ...]:  # noqa: ARG002 - as above
        """Check that what the graph in `folder` gives for an image does not depend on the others."""
        graph = folder / GRAPH_FILE
        alone = image_states(graph, one_by_one(self._batches), optimize=True)
        batch = image_states(graph, self._batches, optimize=True)
        return (check_states("neighbours", "relative", "batches against each image", compare_states(alone, batch)),)

    @property
    def _what(self) -> str:
        sizes = ", ".join(f"{batch.shape[2]} x {batch.shape[3]}" for batch in self._batches)
        return f"{sum(len(batch) for batch in self._batches)} images of {sizes}"


def one_by_one(batches: Sequence[Tensor]) -> list[Tensor]:
    """Every image as a batch of its own."""
    return [image for batch in batches for image in batch[:, None]]


def eager_image_states(model: Transformer, batches: Sequence[Tensor]) -> States:
    """States and vectors of the eager module for all images of `batches`."""
    hidden, read_out = [], []
    with torch.inference_mode():
        for pixels in batches:
            states = model(pixels)
            hidden += list(states.numpy())
            if model.image_readout is not None:
                read_out += list(model.image_readout(states).numpy())
    return States(hidden, read_out or None)


def image_states(graph: Path, batches: Sequence[Tensor], *, optimize: bool = False) -> States:
    """What the graph gives on the CPU for all images of `batches`; ONNX Runtime's optimiser is off unless asked for."""
    session = open_on_cpu(graph, optimize=optimize)
    names = [node.name for node in session.get_outputs()]
    hidden, read_out = [], []
    for pixels in batches:
        found = dict(zip(names, session.run(None, {PIXEL_VALUES: pixels.numpy()}), strict=True))
        hidden += list(found.pop(HIDDEN_STATES))
        read_out += [vector for vectors in found.values() for vector in vectors]
    return States(hidden, read_out or None)
