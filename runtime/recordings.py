"""Recordings to the samples that a model hears: files read, channels mixed, sampling rates converted, lengths checked.

In: a file, or samples and their rate. Out: float32 samples [n] at the model's rate, or one line that says what is wrong
and what to do. Files need soundfile, other rates soxr (extra `audio`), when they are met.
"""

import numbers
import os
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.audio_config import SAMPLING_RATE

Samples = NDArray[np.float32]
Recording = str | os.PathLike[str] | tuple[NDArray[np.floating[Any]], int]

INSTALL = "pip install 'graphport[audio]'"
_MOST_CHANNELS = 32
_LOUDEST = 16.0  # 24 dB above what a file of whole numbers can hold: beyond it the samples have another scale
_RATES = range(1_000, 768_001)
# libsndfile 1.2's log on the chunk of samples: the bytes that the header has, and those that are there
_TORN = re.compile(r"^\s*(?:data|SSND)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE)
_UNKNOWN_BYTES = 0x7FFF_F000  # from here on writers of streams mean that they did not know the length


def read_recording(given: object, name: str, *, longest: int) -> Samples:
    """Samples [n] of a recording, at most `longest` of them, at 16 kHz; `name` is what errors call it.

    Raises TypeError and ValueError for what is no recording, is empty, too long or holds values that are not finite,
    ModuleNotFoundError with the command that installs what is missing.
    """
    if isinstance(given, str | os.PathLike):
        samples, rate = _from_file(given, name)
    elif isinstance(given, tuple) and len(given) == 2:
        samples, rate = _checked_samples(given[0], name), _checked_rate(given[1], name)
    else:
        raise TypeError(
            f"{name} is of type {type(given).__name__}; give a recording: the path of a WAV or FLAC file, or a pair of "
            "float samples [n] (or [n, channels]) and their sampling rate"
        )
    if samples.size == 0:
        raise ValueError(f"{name} is empty: there is nothing to hear; give a recording with samples")
    if not np.isfinite(samples).all():
        raise ValueError(f"{name} holds samples that are not finite; give numbers between -1 and 1")
    loudest = float(max(samples.max(), -samples.min()))
    if loudest > _LOUDEST:
        raise ValueError(
            f"{name} reaches {loudest:.6g}, and samples lie between -1 and 1; divide them by the scale they have (that "
            "of int16 is 32768)"
        )
    seconds, most = len(samples) / rate, longest / SAMPLING_RATE
    if seconds > most:
        raise ValueError(
            f"{name} is {seconds:.6g} s long, and the model hears {most:g} s at once; cut it where nobody speaks, and "
            "give the pieces one by one"
        )
    mono = samples if samples.ndim == 1 else samples.mean(axis=1)
    return _resampled(mono, rate, name)[:longest].astype(np.float32, copy=False)


def _from_file(path: "str | os.PathLike[str]", name: str) -> tuple[Samples, int]:
    try:
        import soundfile
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} is a file, and files need soundfile: {INSTALL}; samples are given as (float array, sampling rate)"
        ) from error
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for names that are too long
        raise ValueError(f"{name}: {os.fspath(path)!r} is a folder; give the path of a WAV or FLAC file")
    if not os.path.isfile(path):  # noqa: PTH113 - as above
        raise ValueError(f"{name}: no file at {os.fspath(path)!r}; give the path of a WAV or FLAC file")
    try:
        with soundfile.SoundFile(path) as file:
            samples, rate, log = file.read(dtype="float32"), file.samplerate, file.extra_info
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise ValueError(f"{name}: {os.fspath(path)!r} cannot be read as a recording: {error}") from error
    torn = _TORN.search(log)
    if torn is not None and int(torn[2]) < int(torn[1]) < _UNKNOWN_BYTES:
        raise ValueError(
            f"{name}: {os.fspath(path)!r} is torn: its header counts {torn[1]} bytes of samples, {torn[2]} are there; "
            "copy it again"
        )
    return samples, _checked_rate(rate, name)


def _checked_samples(samples: object, name: str) -> NDArray[Any]:
    if not isinstance(samples, np.ndarray) or samples.dtype.kind != "f":
        kind = f"an array of {samples.dtype}" if isinstance(samples, np.ndarray) else f"a {type(samples).__name__}"
        raise TypeError(f"{name} holds {kind}; samples are an array of floats between -1 and 1 (int16 / 32768)")
    if samples.ndim not in (1, 2) or (samples.ndim == 2 and not 1 <= samples.shape[1] <= _MOST_CHANNELS):
        raise ValueError(f"{name} is an array {list(samples.shape)}; samples are [n] or [n, channels]")
    return samples


def _checked_rate(rate: object, name: str) -> int:
    if isinstance(rate, bool) or not isinstance(rate, numbers.Integral):
        raise TypeError(f"{name} has the sampling rate {rate!r}; it is a whole number of samples a second")
    if rate not in _RATES:
        raise ValueError(f"{name} has the sampling rate {rate}; it must lie in {_RATES.start} .. {_RATES.stop - 1}")
    return int(rate)


def _resampled(samples: NDArray[Any], rate: int, name: str) -> NDArray[Any]:
    if rate == SAMPLING_RATE:
        return samples
    try:
        import soxr
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{name} has {rate} samples a second, the model hears {SAMPLING_RATE}, and converting needs soxr: {INSTALL}"
        ) from error
    found: NDArray[Any] = soxr.resample(samples.astype(np.float32), rate, SAMPLING_RATE)
    return found
