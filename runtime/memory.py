"""How many bytes a session needs, compared with what is free before anything is taken.

In: a manifest and sizes. Out: bytes, or a refusal with the numbers. It allocates nothing.
"""

from graphport.model_def.signature import DType, Manifest, TensorSpec, past_key

ELEMENT_BYTES: dict[DType, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}

MIB = 1 << 20


class NotEnoughMemoryError(MemoryError):
    """What was asked for does not fit; the message names what is needed, what is free and what would fit."""


def cache_specs(manifest: Manifest) -> tuple[TensorSpec, ...]:
    """The cache inputs of the graph, K and V of layer 0 first."""
    prefix = past_key(0).split(".", maxsplit=1)[0]
    return tuple(spec for spec in manifest.signature.inputs if spec.name.startswith(prefix))


def require_memory(needed: int, free: int, *, what: str, advice: str) -> None:
    """Raise NotEnoughMemoryError when `needed` bytes for `what` exceed `free`."""
    if needed > free:
        raise NotEnoughMemoryError(f"{what} needs {needed / MIB:.1f} MiB, {free / MIB:.1f} MiB are free; {advice}")
