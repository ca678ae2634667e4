"""What an open encoder of texts and one of images have in common: a session, limits, batches, what is refused.

In: a checked bundle of an encoder, options. Out: rows of an output, batch by batch, float32. What is fed, and what the
rows mean, is said by `encoder.py` and `image_encoder.py`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NotRequired, Self, TypedDict

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.config import TransformerConfig
from graphport.model_def.flags import require_flags
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.certified_bundle import require_certified, require_same_surroundings
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.device import Device, DeviceWish, default_threads
from graphport.runtime.encoder_session import EncoderSession
from graphport.runtime.limits import MOST_ROWS, checked_count
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.session import checked_threads

Rows = NDArray[np.float32]


class OpeningOptions(TypedDict):
    """The keyword arguments of an `OpenEncoder`; see `load_encoder`. What is left out is as there by default."""

    max_batch: int
    device: NotRequired[DeviceWish]
    device_id: NotRequired[int]
    provider_options: NotRequired[Mapping[str, OptionValue] | None]
    max_length: NotRequired[int | None]
    threads: NotRequired[int | None]
    stream: NotRequired[int | None]
    strict: NotRequired[bool]


class OpenEncoder:
    """An open encoder. Methods may be called from several threads.

    Attributes: `device`, `device_id`, `provider_options`, `memory_plan`, `threads`, `max_batch`, `max_length`,
    `manifest`.
    """

    def __init__(
        self,
        bundle: BundleFiles,
        *,
        max_batch: int,
        device: DeviceWish = "auto",
        device_id: int = 0,
        provider_options: Mapping[str, OptionValue] | None = None,
        max_length: int | None = None,
        threads: int | None = None,
        stream: int | None = None,
        strict: bool = False,
    ) -> None:
        require_flags(strict=strict)
        self.manifest = bundle.manifest
        longest = self.manifest.max_length
        wish = longest if max_length is None else max_length
        self.max_length = checked_count("max_length", wish, most=longest, reason=", the bundle's own")
        self.max_batch = checked_count("max_batch", max_batch, most=MOST_ROWS)
        self.threads = default_threads() if threads is None else checked_threads(threads)
        limits = RunLimits(max_batch=self.max_batch, max_length=self.max_length, prefill_chunk=self.max_length)
        certificate = require_certified(bundle) if strict else None
        session = EncoderSession(
            bundle,
            limits=limits,
            threads=self.threads,
            device=device,
            device_id=device_id,
            provider_options=provider_options,
            stream=stream,
        )
        if certificate is not None:
            require_same_surroundings(certificate, bundle.folder, session.device)
        self.device: Device = session.device
        self.device_id = session.device_id
        self.provider_options = session.provider_options
        self.memory_plan = session.memory_plan
        self._session: EncoderSession | None = session

    def close(self) -> None:
        """Give the session back; later calls raise."""
        self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batches(self, items: Sequence[Any], batch_size: int | None) -> Iterable[list[int]]:
        """Numbers of the items that run together, checked against `max_batch`; each kind cuts its own way."""
        size = self.max_batch if batch_size is None else batch_size
        size = checked_count("batch_size", size, most=self.max_batch, reason=", max_batch of load")
        return self._cut(items, size)

    def _cut(self, items: Sequence[Any], size: int) -> Iterable[list[int]]:
        raise NotImplementedError

    def _feed(self, session: EncoderSession, items: list[Any], output: str) -> Rows:
        raise NotImplementedError

    def _open_session(self) -> EncoderSession:
        if self._session is None:
            raise RuntimeError(f"this {type(self).__name__} is closed; load the bundle again")
        return self._session

    def _runs(self, items: Sequence[Any], output: str, batch_size: int | None) -> Iterator[tuple[list[int], Rows]]:
        """Numbers of the items of each batch, and what the graph gives for them."""
        session = self._open_session()
        for batch in self._batches(items, batch_size):
            yield batch, self._feed(session, [items[index] for index in batch], output)


def normalized(vectors: Rows) -> Rows:
    """Vectors [n, D] scaled to length 1; one of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled = vectors.copy()
    scaled /= np.where(lengths > 0, lengths, 1)
    return scaled


def label_probabilities(logits: NDArray[np.float32], *, multi_label: bool) -> NDArray[np.float32]:
    """Softmax of logits [..., L], a sigmoid of each with `multi_label`, a single one as it is."""
    if logits.shape[-1] == 1:
        return logits.copy()
    if multi_label:
        each: NDArray[np.float32] = 0.5 * (1 + np.tanh(0.5 * logits))  # the logistic function, without overflow
        return each
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: NDArray[np.float32] = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def checked_conditioning(vectors: Any, config: TransformerConfig, *, num_texts: int) -> Rows | None:  # noqa: ANN401
    """The vectors of a caller as float32 [num_texts, W]; None where the model reads none. Raises ValueError."""
    if not config.conditioned:
        if vectors is not None:
            raise ValueError("this model reads no conditioning; leave it out")
        return None
    wanted = (num_texts, config.hidden_size)
    if vectors is None:
        raise ValueError(f"this model is conditioned on a vector a text; give conditioning, float {list(wanted)}")
    try:
        array = np.asarray(vectors)
    except ValueError as error:  # vectors of several widths
        raise ValueError(f"conditioning must be float {list(wanted)}, got vectors of several widths") from error
    if array.shape != wanted or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"conditioning must be float {list(wanted)}, got {array.dtype} {list(array.shape)}")
    with np.errstate(over="ignore"):  # refused below
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ValueError("conditioning has numbers that are not finite")
    return array


def require_finite(values: NDArray[np.float32]) -> None:
    """Raise FloatingPointError when a value is NaN or infinite."""
    if not np.isfinite(values).all():
        raise FloatingPointError("the model overflowed: a hidden state is not finite; export it with --precision bf16")
