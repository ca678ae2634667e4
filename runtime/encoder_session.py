"""One encoder graph on ONNX Runtime: opened, checked against its manifest, and run a batch at a time.

In: a checked bundle, rows of ids or images of one size. Out: hidden states or what is read out of them. It batches
nothing and encodes no text; several threads may run it at once. Legend: B rows, S tokens of the longest, W hidden size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import (
    INPUT_IDS,
    LENGTHS,
    LOGITS,
    LOGITS_ROWS,
    PIXEL_VALUES,
    TOKEN_TYPE_IDS,
    encoder_signature,
    image_signature,
)
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.cuda_setup import CudaSetup
from graphport.runtime.device import DeviceError, DeviceRequest, DeviceWish
from graphport.runtime.graph_checks import check_placement, check_signature, node_placement
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.opening import open_graph


class EncoderSession:
    """An open encoder graph.

    Attributes: `device`, `device_id`, `provider_options`, `memory_plan` and `placement` as of `Session`.
    """

    def __init__(
        self,
        bundle: BundleFiles,
        *,
        limits: RunLimits,
        threads: int,
        device: DeviceWish,
        device_id: int,
        provider_options: Mapping[str, OptionValue] | None,
        stream: int | None,
    ) -> None:
        """See `load_encoder`. Raises DeviceError, NotEnoughMemoryError, ValueError, TypeError."""
        request = DeviceRequest(wish=device, device_id=device_id, provider_options=provider_options)
        cuda = CudaSetup(cuda_graphs=False, stream=stream, device_id=request.device_id)
        opened = open_graph(bundle, request, limits, cuda, threads=threads)
        self._session, self.device, self.device_id = opened.session, opened.device, opened.device_id
        self.provider_options, self.memory_plan = opened.provider_options, opened.plan
        self.placement = node_placement(self._session)
        check_placement(self.placement, self.device)
        if self.device == "cpu" and stream is not None:
            raise DeviceError("stream needs device cuda, and this session runs on the CPU")
        signature = bundle.manifest.signature
        check_signature("input", signature.inputs, self._session.get_inputs())
        check_signature("output", signature.outputs, self._session.get_outputs())
        config = bundle.manifest.config
        if signature != (encoder_signature(config) if config.image is None else image_signature(config)):
            raise ValueError("the manifest's configuration does not fit its graph; export the bundle again")
        self._inputs = {spec.name for spec in signature.inputs}
        self._setup = cuda  # the stream lives as long as the session that runs on it

    def run(
        self,
        rows: Sequence[Sequence[int]],
        output: str,
        *,
        types: Sequence[Sequence[int]] | None = None,
        places: Sequence[int] | None = None,
    ) -> NDArray[np.float32]:
        """`output` of rows of ids padded to the longest: hidden_states [B, S, W], embeddings [B, W], or logits.

        What is beyond a row's length is unspecified. Token types, where the graph has them, are 0 unless given. A
        masked head gives logits [B, S, V] of all tokens, or [R, V] of `places` in the flattened batch [B * S].
        """
        lengths = np.array([len(row) for row in rows], np.int32)
        feed: dict[str, NDArray[Any]] = {INPUT_IDS: _padded(rows, lengths), LENGTHS: lengths}
        if TOKEN_TYPE_IDS in self._inputs:
            feed[TOKEN_TYPE_IDS] = np.zeros_like(feed[INPUT_IDS]) if types is None else _padded(types, lengths)
        if LOGITS_ROWS in self._inputs:
            every = np.arange(feed[INPUT_IDS].size if output == LOGITS else 0)
            feed[LOGITS_ROWS] = every if places is None else np.array(places, np.int64)
        (found,) = self._session.run([output], feed)
        result: NDArray[np.float32] = found
        if output == LOGITS and LOGITS_ROWS in self._inputs and places is None:
            result = result.reshape(*feed[INPUT_IDS].shape, -1)
        return result

    def run_images(self, pixels: NDArray[np.float32], output: str) -> NDArray[np.float32]:
        """`output` of images of one size [B, C, h, w]: hidden_states [B, S, W], embeddings [B, D], or logits [B, L]."""
        (found,) = self._session.run([output], {PIXEL_VALUES: pixels})
        result: NDArray[np.float32] = found
        return result


def _padded(rows: Sequence[Sequence[int]], lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    """Rows of numbers with zeros behind the shorter ones."""
    padded = np.zeros((len(rows), int(lengths.max())), np.int64)
    for whole, row in zip(padded, rows, strict=True):
        whole[: len(row)] = row
    return padded
