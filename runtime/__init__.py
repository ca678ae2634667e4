"""Bundle in, tokens or embeddings out, on ONNX Runtime. Nothing here imports torch or onnx."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphport.runtime.bundle_files import open_bundle
    from graphport.runtime.dual_encoder import DualEncoder, load_dual_encoder
    from graphport.runtime.encoder import Encoder, load_encoder
    from graphport.runtime.generation_output import GenerationOutput
    from graphport.runtime.image_encoder import ImageEncoder, load_image_encoder
    from graphport.runtime.language_model import LanguageModel
    from graphport.runtime.loading import load
    from graphport.runtime.open_language_model import load_language_model
    from graphport.runtime.preparation import Prepared, prepare
    from graphport.runtime.recurrent_model import RecurrentModel
    from graphport.runtime.sampling_params import SamplingParams
    from graphport.runtime.sequence import StreamEvent
    from graphport.runtime.sequence_state import SequenceState
    from graphport.runtime.session import Session
    from graphport.runtime.tuning import Tuning
    from graphport.runtime.tuning_trial import tune

__all__ = [
    "DualEncoder",
    "Encoder",
    "GenerationOutput",
    "ImageEncoder",
    "LanguageModel",
    "Prepared",
    "RecurrentModel",
    "SamplingParams",
    "SequenceState",
    "Session",
    "StreamEvent",
    "Tuning",
    "load",
    "load_dual_encoder",
    "load_encoder",
    "load_image_encoder",
    "load_language_model",
    "open_bundle",
    "prepare",
    "tune",
]

# ONNX Runtime is loaded when something that needs it is first asked for.
_HOMES = {
    "DualEncoder": "graphport.runtime.dual_encoder",
    "Encoder": "graphport.runtime.encoder",
    "GenerationOutput": "graphport.runtime.generation_output",
    "ImageEncoder": "graphport.runtime.image_encoder",
    "LanguageModel": "graphport.runtime.language_model",
    "Prepared": "graphport.runtime.preparation",
    "RecurrentModel": "graphport.runtime.recurrent_model",
    "SamplingParams": "graphport.runtime.sampling_params",
    "SequenceState": "graphport.runtime.sequence_state",
    "Session": "graphport.runtime.session",
    "StreamEvent": "graphport.runtime.sequence",
    "Tuning": "graphport.runtime.tuning",
    "load": "graphport.runtime.loading",
    "load_dual_encoder": "graphport.runtime.dual_encoder",
    "load_encoder": "graphport.runtime.encoder",
    "load_image_encoder": "graphport.runtime.image_encoder",
    "load_language_model": "graphport.runtime.open_language_model",
    "open_bundle": "graphport.runtime.bundle_files",
    "prepare": "graphport.runtime.preparation",
    "tune": "graphport.runtime.tuning_trial",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ImportError as error:
        if (error.name or "").split(".")[0] != "onnxruntime":
            raise
        raise RuntimeError(
            f"onnxruntime is not installed, or in part ({error}); do: pip uninstall onnxruntime onnxruntime-gpu, then "
            "pip install onnxruntime-gpu"
        ) from error
