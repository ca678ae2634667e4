"""The images that an image encoder is compared on, and how the eager module and graphs are run on them.

In: a configuration, a seed. Out: `ImageFeed`, a `Feed` of `encoder_evidence.py`. It compares nothing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from graphport.export.encoder_runner import States
from graphport.export.graph_runner import open_on_cpu
from graphport.model_def.certified_inputs import ImageInputs, Inputs
from graphport.model_def.config import TransformerConfig
from graphport.model_def.encoder_runs import image_runs
from graphport.model_def.played_runs import Evidence, References, play_runs
from graphport.model_def.seeded_images import IMAGES_A_SIZE, image_sizes, seeded_images
from graphport.model_def.signature import HIDDEN_STATES, PIXEL_VALUES
from graphport.model_def.transformer import Transformer

Batches = Sequence[NDArray[np.float32]]  # each [B, C, h, w]


class ImageFeed:
    """Seeded images of several sizes; see `Feed`."""

    alone = "each image alone"

    def __init__(
        self,
        config: TransformerConfig,
        tokenizer_json: str | None,  # noqa: ARG002 - of every kind's
        *,
        max_length: int,
        seed: int,
        inputs: Inputs | None = None,
    ) -> None:
        image = config.image
        assert image is not None
        sizes = tuple(image_sizes(image, max_length=max_length))
        words = f"{IMAGES_A_SIZE} seeded images ({seed}) a size"
        self.inputs = inputs or ImageInputs(origin=words, seed=seed, sizes=sizes)
        assert isinstance(self.inputs, ImageInputs)
        self._config = config
        self._batches = seeded_images(self.inputs.sizes, channels=image.channels, seed=self.inputs.seed)
        sizes_in_words = ", ".join(f"{height} x {width}" for height, width in self.inputs.sizes)
        self.words = f"{sum(map(len, self._batches))} images of {sizes_in_words}"
        self.uncovered: tuple[str, ...] = () if image.fixed_size else ("images of other sizes",)

    def eager(self, model: Transformer) -> States:
        """See Feed."""
        return eager_image_states(model, one_by_one(self._batches))

    def batches(self, graph: Path, *, optimize: bool, pad_id: int = 0) -> States:  # noqa: ARG002 - nothing is padded
        """See Feed: all images of a size together."""
        return image_states(graph, self._batches, optimize=optimize)

    def each_alone(self, graph: Path, *, optimize: bool) -> States:
        """See Feed."""
        return image_states(graph, one_by_one(self._batches), optimize=optimize)

    def play(self, graph: Path, references: References, *, observe: Callable[[str], None]) -> Evidence:
        """See Feed."""
        return play_runs(
            ImageRunner(graph, optimize=True),
            image_runs(self._config, self._batches),
            references,
            observe=observe,
        )


class ImageRunner:
    """One session over an image encoder's graph on the CPU; ONNX Runtime's optimiser is off unless asked for."""

    def __init__(self, path: Path, *, optimize: bool = False) -> None:
        self._session = open_on_cpu(path, optimize=optimize)
        self.outputs = [node.name for node in self._session.get_outputs()]

    def run_images(self, pixels: NDArray[np.float32], output: str) -> NDArray[np.float32]:
        """See ImageModel."""
        (found,) = self._session.run([output], {PIXEL_VALUES: pixels})
        rows: NDArray[np.float32] = found
        return rows


def one_by_one(batches: Batches) -> list[NDArray[np.float32]]:
    """Every image as a batch of its own."""
    return [image for batch in batches for image in batch[:, None]]


def eager_image_states(model: Transformer, batches: Batches) -> States:
    """States and vectors of the eager module for all images of `batches`."""
    hidden, read_out = [], []
    with torch.inference_mode():
        for pixels in batches:
            states = model(torch.from_numpy(pixels))
            hidden += list(states.numpy())
            if model.image_readout is not None:
                read_out += list(model.image_readout(states).numpy())
    return States(hidden, read_out or None)


def image_states(graph: Path, batches: Batches, *, optimize: bool = False) -> States:
    """What the graph gives on the CPU for all images of `batches`."""
    runner = ImageRunner(graph, optimize=optimize)
    hidden: list[NDArray[np.float32]] = []
    read_out: list[NDArray[np.float32]] = []
    for pixels in batches:
        for output in runner.outputs:
            (hidden if output == HIDDEN_STATES else read_out).extend(runner.run_images(pixels, output))
    return States(hidden, read_out or None)
