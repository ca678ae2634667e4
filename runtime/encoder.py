"""An encoder's bundle opened for use: texts or ids in, a vector or label scores a text out.

In: texts in any number and order. Out: embeddings or label scores float32, in that order. It checks every text before
any runs; which texts run together is decided by `encoder_batches.py`. Legend: W hidden size, L labels.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import EMBEDDINGS, HIDDEN_STATES, LOGITS
from graphport.runtime.bundle_files import BundleFiles, open_bundle
from graphport.runtime.certified_bundle import require_certified, require_same_surroundings
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.device import Device, DeviceWish, default_threads
from graphport.runtime.encoder_batches import cut_batches
from graphport.runtime.encoder_session import EncoderSession
from graphport.runtime.limits import MOST_ROWS, checked_count
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.prompts import checked_prompt_ids
from graphport.runtime.session import checked_threads
from graphport.runtime.tokenizer import Tokenizer

Text = str | Sequence[int] | NDArray[np.integer[Any]]

ENCODER_BATCH = 32

_log = logging.getLogger(__name__)


def load_encoder(
    bundle: str | os.PathLike[str],
    *,
    device: DeviceWish = "auto",
    device_id: int = 0,
    provider_options: Mapping[str, OptionValue] | None = None,
    max_batch: int = ENCODER_BATCH,
    max_length: int | None = None,
    threads: int | None = None,
    stream: int | None = None,
    strict: bool = False,
) -> "Encoder":
    """Open an encoder's bundle.

    device_id, provider_options, threads, stream, strict: as of `load_language_model`. max_batch: texts that run
    together at most; memory is planned for so many of max_length tokens. max_length: longest text in tokens, special
    tokens included, at most and by default the bundle's. Raises ManifestError, DeviceError, NotEnoughMemoryError, and
    ValueError, also for a decoder's bundle.
    """
    return Encoder(
        open_bundle(bundle),
        device=device,
        device_id=device_id,
        provider_options=provider_options,
        max_batch=max_batch,
        max_length=max_length,
        threads=threads,
        stream=stream,
        strict=strict,
    )


class Encoder:
    """An open encoder. Methods may be called from several threads.

    Attributes: `device`, `device_id`, `provider_options`, `memory_plan`, `threads`, `max_batch`, `max_length`,
    `dimension` W, `manifest`, `tokenizer` (None if the bundle has none).
    """

    def __init__(
        self,
        bundle: BundleFiles,
        *,
        device: DeviceWish = "auto",
        device_id: int = 0,
        provider_options: Mapping[str, OptionValue] | None = None,
        max_batch: int = ENCODER_BATCH,
        max_length: int | None = None,
        threads: int | None = None,
        stream: int | None = None,
        strict: bool = False,
    ) -> None:
        self.manifest = bundle.manifest
        if self.manifest.kind != "encoder":
            what, use = "a decoder", "generate"
            if self.manifest.config.image is not None:
                what, use = "an image encoder", "encode_images"
            raise ValueError(f"{bundle.folder} is {what}, which embeds no text; use {use}")
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
        self.tokenizer = Tokenizer.load(bundle.folder) if bundle.has_tokenizer else None
        self.dimension = self.manifest.config.hidden_size
        if certificate is not None:
            require_same_surroundings(certificate, bundle.folder, session.device)
        self.device: Device = session.device
        self.device_id = session.device_id
        self.provider_options = session.provider_options
        self.memory_plan = session.memory_plan
        self._session: EncoderSession | None = session

    def encode(
        self,
        texts: Sequence[Text],
        *,
        batch_size: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """One vector a text, float32 [len(texts), W], in the order of `texts` (each a str or a list of ids).

        batch_size: texts that run together, at most and by default `max_batch`. normalize: scale vectors to length 1,
        None as the model's recipe says; a vector of zeros stays. truncate: cut texts that are longer than `max_length`
        at their end, special tokens kept, and log how many; without it they are refused. A text's vector does not
        depend on the others, up to rounding. Raises TypeError and ValueError for texts before any runs, and
        FloatingPointError when the model overflows.
        """
        pooling = self.manifest.config.pooling
        if pooling is None:
            other = "hidden_states" if self.manifest.config.classifier is None else "classify"
            raise ValueError(f"this bundle has no pooling, so no vector a text; use {other}")
        rows = self._checked_rows(texts, truncate=truncate)
        vectors = np.empty((len(rows), self.dimension), np.float32)
        for batch, found in self._runs(rows, EMBEDDINGS, batch_size):
            vectors[batch] = found
        require_finite(vectors)
        if pooling.normalize if normalize is None else normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors /= np.where(lengths > 0, lengths, 1)
        return vectors

    def hidden_states(
        self, texts: Sequence[Text], *, batch_size: int | None = None, truncate: bool = False
    ) -> list[NDArray[np.float32]]:
        """The last hidden states of each text, float32 [its tokens, W]; arguments and errors as of `encode`."""
        rows = self._checked_rows(texts, truncate=truncate)
        states: list[NDArray[np.float32]] = [np.empty((0, self.dimension), np.float32)] * len(rows)
        for batch, found in self._runs(rows, HIDDEN_STATES, batch_size):
            for index, row in zip(batch, found, strict=True):
                states[index] = row[: len(rows[index])].copy()
                require_finite(states[index])
        return states

    @property
    def labels(self) -> tuple[str, ...]:
        """What a classifier tells apart; empty for other encoders."""
        classifier = self.manifest.config.classifier
        return () if classifier is None else classifier.labels

    def classify(
        self, texts: Sequence[Text], *, batch_size: int | None = None, truncate: bool = False
    ) -> list[NDArray[np.float32]]:
        """Probabilities of `labels` for each text, float32 [L], or of each of its tokens, float32 [tokens, L].

        They sum to 1, or lie between 0 and 1 each where labels do not exclude each other; of a single label the score
        is given as it is (a regression). Arguments and errors as of `encode`.
        """
        classifier = self.manifest.config.classifier
        if classifier is None:
            raise ValueError("this bundle has no classifier; use encode or hidden_states")
        rows = self._checked_rows(texts, truncate=truncate)
        scores: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(rows)
        for batch, found in self._runs(rows, LOGITS, batch_size):
            for index, row in zip(batch, found, strict=True):
                logits = row[: len(rows[index])] if classifier.per_token else row
                require_finite(logits)
                scores[index] = label_probabilities(logits, multi_label=classifier.multi_label)
        return scores

    def close(self) -> None:
        """Give the session back; later calls raise."""
        self._session = None

    def __enter__(self) -> "Encoder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _runs(
        self, rows: Sequence[Sequence[int]], output: str, batch_size: int | None
    ) -> Iterator[tuple[list[int], NDArray[np.float32]]]:
        """Indices of the texts of each batch, and what the graph gives for them."""
        session = self._session
        if session is None:
            raise RuntimeError("this Encoder is closed; load the bundle again")
        size = self.max_batch if batch_size is None else batch_size
        size = checked_count("batch_size", size, most=self.max_batch, reason=", max_batch of load")
        for batch in cut_batches([len(row) for row in rows], max_rows=size):
            yield batch, session.run([rows[index] for index in batch], output)

    def _checked_rows(self, texts: Sequence[Text], *, truncate: bool) -> list[tuple[int, ...]]:
        if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
            raise TypeError(f"texts must be a list of str or of lists of ids, got {type(texts).__name__}; use [text]")
        rows, num_cut = [], 0
        for index, text in enumerate(texts):
            row, is_cut = self._checked_row(text, f"text {index}", truncate=truncate)
            rows.append(row)
            num_cut += is_cut
        if num_cut:
            _log.warning("%d of %d texts were cut to %d tokens", num_cut, len(rows), self.max_length)
        return rows

    def _checked_row(self, text: Text, name: str, *, truncate: bool) -> tuple[tuple[int, ...], bool]:
        """Ids of one text, and whether its end was cut off."""
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ValueError(f"{name} is a str, and this bundle has no tokenizer; give texts as lists of ids")
            ids, num_cut = self.tokenizer.encode_at_most(text, self.max_length)
            if num_cut and not truncate:
                raise ValueError(_too_long(name, len(ids) + num_cut, self.max_length))
            return self._checked_ids(ids, name), bool(num_cut)
        if not isinstance(text, np.ndarray) and not isinstance(text, Sequence):
            raise TypeError(f"{name} is of type {type(text).__name__}; give a str or a list of ids")
        num_cut = max(len(text) - self.max_length, 0)
        if num_cut and not truncate:
            raise ValueError(_too_long(name, len(text), self.max_length))
        return self._checked_ids(text[: self.max_length], name), bool(num_cut)

    def _checked_ids(self, ids: object, name: str) -> tuple[int, ...]:
        return checked_prompt_ids(ids, name, vocab_size=self.manifest.config.vocab_size, max_length=self.max_length)


def _too_long(name: str, length: int, most: int) -> str:
    return (
        f"{name} has {length} tokens, more than max_length ({most}); shorten it, or cut it with truncate=True (embed: "
        "--truncate), or export with a larger --context"
    )


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


def require_finite(values: NDArray[np.float32]) -> None:
    """Raise FloatingPointError when a value is NaN or infinite."""
    if not np.isfinite(values).all():
        raise FloatingPointError("the model overflowed: a hidden state is not finite; export it with --precision bf16")
