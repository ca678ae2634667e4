"""A bundle of any kind opened as it serves, with the runs of its certificate: one function a kind, and their table.

In: a checked bundle, what its certificate feeds. Out: where it runs, and a way to play the runs. It judges nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.certified_inputs import ImageInputs, Inputs, Row, RowInputs, SourceInputs, TextInputs
from graphport.model_def.decoder_runs import planned_runs
from graphport.model_def.encoder_runs import image_runs, text_runs
from graphport.model_def.played_runs import Evidence, References, play_runs
from graphport.model_def.seeded_images import IMAGES_A_SIZE, seeded_images
from graphport.model_def.seeded_sources import certified_sources
from graphport.model_def.signature import Kind
from graphport.model_def.source_runs import planned_source_runs
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.device import Device, DeviceWish, default_threads
from graphport.runtime.encoder_session import EncoderSession
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.served_model import ServedModel
from graphport.runtime.session import Session, checked_threads

_MOST_ROWS_AT_ONCE = 3  # of a decoder's batches

Observe = Callable[[str], None]


class Play(Protocol):
    """Plays the runs and holds them to `references`."""

    def __call__(self, references: References, *, observe: Observe) -> Evidence: ...  # noqa: D102 - stands for itself


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifiedModel:
    """An open bundle: its device, whether it is the graph packed for this processor, and its runs."""

    device: Device
    is_prepared: bool
    play: Play


def open_certified(
    bundle: BundleFiles, inputs: Inputs, *, device: DeviceWish, threads: int | None, prepared: bool
) -> CertifiedModel:
    """Open `bundle` for runs on `inputs`. Raises what opening a session raises."""
    return _OPENS[bundle.manifest.kind](bundle, inputs, device, threads, prepared)


def _open_decoder(
    bundle: BundleFiles, inputs: Inputs, device: DeviceWish, threads: int | None, prepared: bool
) -> CertifiedModel:
    assert isinstance(inputs, TextInputs)
    length = len(inputs.ids)
    limits = RunLimits(max_batch=_MOST_ROWS_AT_ONCE, max_length=length, prefill_chunk=length)
    session = Session(bundle, device=device, limits=limits, threads=threads, prepared=prepared)
    model, runs = ServedModel(session, max_length=length), planned_runs(bundle.manifest.config, inputs.ids)

    def play(references: References, *, observe: Observe) -> Evidence:
        return play_runs(model, runs, references, observe=observe)

    return CertifiedModel(device=session.device, is_prepared=session.is_prepared, play=play)


def _open_encoder_decoder(
    bundle: BundleFiles, inputs: Inputs, device: DeviceWish, threads: int | None, prepared: bool
) -> CertifiedModel:
    assert isinstance(inputs, SourceInputs)
    config, length = bundle.manifest.config, len(inputs.ids)
    limits = RunLimits(max_batch=_MOST_ROWS_AT_ONCE, max_length=length, prefill_chunk=length)
    session = Session(bundle, device=device, limits=limits, threads=threads, prepared=prepared)
    model = ServedModel(session, max_length=length)
    runs = planned_source_runs(config, certified_sources(config, inputs), inputs.ids)

    def play(references: References, *, observe: Observe) -> Evidence:
        return play_runs(model, runs, references, observe=observe)

    return CertifiedModel(device=session.device, is_prepared=session.is_prepared, play=play)


def _open_encoder(
    bundle: BundleFiles, inputs: Inputs, device: DeviceWish, threads: int | None, prepared: bool
) -> CertifiedModel:
    del prepared  # graphs of encoders are not packed
    assert isinstance(inputs, RowInputs)
    longest = max(len(row.ids) for row in inputs.rows)
    session = _encoder_session(bundle, device, threads, most=len(inputs.rows), longest=longest)
    model, runs = _ServedEncoder(session), text_runs(bundle.manifest.config, inputs.rows)

    def play(references: References, *, observe: Observe) -> Evidence:
        return play_runs(model, runs, references, observe=observe)

    return CertifiedModel(device=session.device, is_prepared=False, play=play)


def _open_image_encoder(
    bundle: BundleFiles, inputs: Inputs, device: DeviceWish, threads: int | None, prepared: bool
) -> CertifiedModel:
    del prepared  # as above
    image = bundle.manifest.config.image
    assert isinstance(inputs, ImageInputs)
    assert image is not None
    longest = max(image.num_tokens(*size) for size in inputs.sizes)
    session = _encoder_session(bundle, device, threads, most=IMAGES_A_SIZE, longest=longest)
    batches = seeded_images(inputs.sizes, channels=image.channels, seed=inputs.seed)
    runs = image_runs(bundle.manifest.config, batches)

    def play(references: References, *, observe: Observe) -> Evidence:
        return play_runs(session, runs, references, observe=observe)

    return CertifiedModel(device=session.device, is_prepared=False, play=play)


_OPENS: dict[Kind, Callable[[BundleFiles, Inputs, DeviceWish, int | None, bool], CertifiedModel]] = {
    "decoder": _open_decoder,
    "encoder_decoder": _open_encoder_decoder,
    "encoder": _open_encoder,
    "image_encoder": _open_image_encoder,
}


def _encoder_session(
    bundle: BundleFiles, device: DeviceWish, threads: int | None, *, most: int, longest: int
) -> EncoderSession:
    return EncoderSession(
        bundle,
        limits=RunLimits(max_batch=most, max_length=longest, prefill_chunk=longest),
        threads=default_threads() if threads is None else checked_threads(threads),
        device=device,
        device_id=0,
        provider_options=None,
        stream=None,
    )


class _ServedEncoder:
    """A `TextModel` over the session that serves."""

    def __init__(self, session: EncoderSession) -> None:
        self._session = session

    def run_rows(self, rows: Sequence[Row], output: str) -> NDArray[np.float32]:
        """See TextModel."""
        return self._session.run([row.ids for row in rows], output, types=[row.types for row in rows])
