"""An encoder's bundle opened for use: texts or ids in, a vector or label scores a text out.

In: texts in any number and order. Out: embeddings or label scores float32, in that order. It checks every text before
any runs; which texts run together is decided by `encoder_batches.py`. Legend: W hidden size, D vector width, L
labels.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.flags import require_flags, require_optional_flags
from graphport.model_def.signature import EMBEDDINGS, HIDDEN_STATES, KIND_WORDS, LOGITS
from graphport.runtime.bundle_files import BundleFiles, open_bundle
from graphport.runtime.cuda_options import OptionValue
from graphport.runtime.device import DeviceWish
from graphport.runtime.encoder_batches import cut_batches
from graphport.runtime.encoder_session import EncoderSession
from graphport.runtime.limits import checked_count
from graphport.runtime.masked_tokens import FilledMask, best_tokens
from graphport.runtime.open_encoder import (
    OpenEncoder,
    OpeningOptions,
    checked_conditioning,
    label_probabilities,
    normalized,
    require_finite,
)
from graphport.runtime.prompts import checked_prompt_ids
from graphport.runtime.tokenizer import Tokenizer
from graphport.runtime.usual_use import usual_use

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


class Encoder(OpenEncoder):
    """An open encoder of texts.

    Attributes besides those of `OpenEncoder`: `dimension` D, `tokenizer` (None if the bundle has none).
    """

    def __init__(self, bundle: BundleFiles, **options: Unpack[OpeningOptions]) -> None:
        if bundle.manifest.kind != "encoder":
            what = KIND_WORDS[bundle.manifest.kind]
            raise ValueError(f"{bundle.folder} is {what}, which embeds no text; use {usual_use(bundle.manifest)}")
        super().__init__(bundle, **options)
        self.tokenizer = Tokenizer.load(bundle.folder) if bundle.has_tokenizer else None
        pooling = self.manifest.config.pooling
        width = self.manifest.config.hidden_size
        self.dimension = width if pooling is None else pooling.vector_width(width)
        self._fill = None if pooling is None else pooling.filled_with
        if self._fill is not None and self.max_length != self.manifest.max_length:
            raise ValueError(
                f"{bundle.folder}: texts are filled up to {self.manifest.max_length} tokens, as the model was trained; "
                f"max_length is {self.max_length}: leave it out"
            )

    def encode(
        self,
        texts: Sequence[Text],
        *,
        batch_size: int | None = None,
        normalize: bool | None = None,
        truncate: bool = False,
    ) -> NDArray[np.float32]:
        """One vector a text, float32 [len(texts), D], in the order of `texts` (each a str or a list of ids).

        batch_size: texts that run together, at most and by default `max_batch`. normalize: scale vectors to length 1,
        None as the model's recipe says; a vector of zeros stays. truncate: cut texts that are longer than `max_length`
        at their end, special tokens kept, and log how many; without it they are refused. A text's vector does not
        depend on the others, up to rounding. Raises TypeError and ValueError for texts before any runs, and
        FloatingPointError when the model overflows.
        """
        pooling = self.manifest.config.pooling
        if pooling is None:
            raise ValueError(f"this bundle has no pooling, so no vector a text; use {usual_use(self.manifest)}")
        require_optional_flags(normalize=normalize)
        rows = self._checked_rows(texts, truncate=truncate)
        vectors = np.empty((len(rows), self.dimension), np.float32)
        for batch, found in self._runs(rows, EMBEDDINGS, batch_size):
            vectors[batch] = found
        require_finite(vectors)
        return normalized(vectors) if (pooling.normalize if normalize is None else normalize) else vectors

    def hidden_states(
        self,
        texts: Sequence[Text],
        *,
        batch_size: int | None = None,
        truncate: bool = False,
        conditioning: NDArray[np.floating[Any]] | None = None,
    ) -> list[NDArray[np.float32]]:
        """The last hidden states of each text and what fills it up, float32 [tokens, W]; for the rest see `encode`.

        conditioning: a vector a text, float [len(texts), W], which a conditioned model needs and others refuse.
        """
        rows = self._checked_rows(texts, truncate=truncate)
        config = self.manifest.config
        vectors = checked_conditioning(conditioning, config, num_texts=len(rows))
        states: list[NDArray[np.float32]] = [np.empty((0, config.hidden_size), np.float32)] * len(rows)
        session = self._open_session()
        for batch in self._batches(rows, batch_size):
            own = None if vectors is None else vectors[batch]
            found = session.run([rows[index] for index in batch], HIDDEN_STATES, conditioning=own)
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
            raise ValueError(f"this bundle has no classifier; use {usual_use(self.manifest)}")
        rows = self._checked_rows(texts, truncate=truncate)
        scores: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(rows)
        for batch, found in self._runs(rows, LOGITS, batch_size):
            for index, row in zip(batch, found, strict=True):
                logits = row[: len(rows[index])] if classifier.per_token else row
                require_finite(logits)
                scores[index] = label_probabilities(logits, multi_label=classifier.multi_label)
        return scores

    def masked_logits(
        self, texts: Sequence[Text], *, batch_size: int | None = None, truncate: bool = False
    ) -> list[NDArray[np.float32]]:
        """Logits of each text's masked places, float32 [places, vocabulary]; arguments and errors as of `encode`.

        A place is a mask token ("[MASK]", "<mask>"). Raises ValueError for texts without one.
        """
        head = self.manifest.config.masked_head
        if head is None:
            raise ValueError(f"this bundle has no masked head; use {usual_use(self.manifest)}")
        if head.mask_id is None:
            raise ValueError("the checkpoint's tokenizer_config.json names no mask_token; add it and export again")
        rows = self._checked_rows(texts, truncate=truncate)
        places = [[column for column, token in enumerate(row) if token == head.mask_id] for row in rows]
        for index, columns in enumerate(places):
            if not columns:
                raise ValueError(f"text {index} has no masked place; write the mask token where a token is missing")
        logits: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(rows)
        for batch in self._batches(rows, batch_size):
            longest = max(len(rows[index]) for index in batch)
            asked = [line * longest + column for line, index in enumerate(batch) for column in places[index]]
            found = self._open_session().run([rows[index] for index in batch], LOGITS, places=asked)
            require_finite(found)
            ends = np.cumsum([len(places[index]) for index in batch])[:-1]
            for index, own in zip(batch, np.split(found, ends), strict=True):
                logits[index] = own
        return logits

    def fill_mask(
        self, texts: Sequence[Text], *, top_k: int = 5, batch_size: int | None = None, truncate: bool = False
    ) -> list[list[list[FilledMask]]]:
        """The `top_k` most probable tokens of each masked place of each text; see `masked_logits`."""
        most = self.manifest.config.vocab_size
        count = checked_count("top_k", top_k, most=most, reason=", the vocabulary")
        every = self.masked_logits(texts, batch_size=batch_size, truncate=truncate)
        return [[best_tokens(row, top_k=count, tokenizer=self.tokenizer) for row in logits] for logits in every]

    def _cut(self, items: Sequence[Sequence[int]], size: int) -> list[list[int]]:
        return cut_batches([len(row) for row in items], max_rows=size)

    def _feed(self, session: EncoderSession, items: list[Sequence[int]], output: str) -> NDArray[np.float32]:
        return session.run(items, output)

    def _checked_rows(self, texts: Sequence[Text], *, truncate: bool) -> list[tuple[int, ...]]:
        if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
            raise TypeError(f"texts must be a list of str or of lists of ids, got {type(texts).__name__}; use [text]")
        require_flags(truncate=truncate)
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

    def _checked_ids(self, ids: Any, name: str) -> tuple[int, ...]:  # noqa: ANN401 - ids of a caller, checked here
        row = ids if self._fill is None else [*ids, *[self._fill] * (self.max_length - len(ids))]
        return checked_prompt_ids(row, name, vocab_size=self.manifest.config.vocab_size, max_length=self.max_length)


def _too_long(name: str, length: int, most: int) -> str:
    return (
        f"{name} has {length} tokens, more than max_length ({most}); shorten it, or cut it with truncate=True (embed: "
        "--truncate), or export with a larger --context"
    )
