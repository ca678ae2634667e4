"""Tensors of other libraries in, logits out to them, where they lie: the DLPack protocol.

In: ids in NumPy arrays or in objects with `__dlpack__` (torch, CuPy, JAX, ...). Out: ids to read, and an object with
`__dlpack__`. It moves nothing. Structures: dlpack.h of DLPack 0.8, whose unversioned capsules every library takes.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from onnxruntime import OrtValue

from graphport.model_def.signature import DType
from graphport.runtime.device import Device
from graphport.runtime.device_memory import DeviceMemory, DeviceTensor

# DLDeviceType: kDLCPU, kDLCUDA.
_DEVICES: dict[Device, int] = {"cpu": 1, "cuda": 2}
_NAMES = {1: "cpu", 2: "cuda", 3: "pinned host memory", 13: "managed CUDA memory"}

# DLDataTypeCode and bits.
_DTYPES: dict[DType, tuple[int, int]] = {"int32": (0, 32), "int64": (0, 64), "float16": (2, 16), "float32": (2, 32)}

_CAPSULE = b"dltensor"


@runtime_checkable
class SupportsDlpack(Protocol):
    """A tensor of any library that follows the protocol."""

    def __dlpack__(self, *, stream: Any = None) -> object:  # noqa: ANN401 - each library has its own streams
        """A capsule of the tensor, ready on `stream`."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Kind and number of the device that the tensor lies on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIds:
    """Ids [B, S] int64 at `address` on the session's device; `owner` keeps them alive."""

    address: int
    shape: tuple[int, int]
    num_bytes: int
    owner: object


def take_ids(ids: NDArray[Any] | SupportsDlpack, memory: DeviceMemory) -> NDArray[np.int64] | DeviceIds:
    """Ids [B, S], as they lie: on the host in any layout and integer type, on the device contiguous int64.

    Raises TypeError for something else than a tensor and for floats, ValueError for another rank, another device, or a
    layout or type that would need a copy on the device.
    """
    if not isinstance(ids, np.ndarray | SupportsDlpack):
        raise TypeError(f"ids must be an array or a DLPack tensor [rows, tokens], got {type(ids).__name__}")
    kind, number = (_DEVICES["cpu"], 0) if isinstance(ids, np.ndarray) else ids.__dlpack_device__()
    if kind == _DEVICES["cpu"]:
        return _host_ids(ids if isinstance(ids, np.ndarray) else np.from_dlpack(ids))  # type: ignore[arg-type]  # its stub is narrower than the protocol
    if (kind, number) != (_DEVICES[memory.device], memory.device_id):
        raise ValueError(
            f"ids lie on {_NAMES.get(int(kind), f'DLPack device {int(kind)}')}:{number}, the session runs on "
            f"{memory.device}:{memory.device_id}; move them there, or to the host"
        )
    assert not isinstance(ids, np.ndarray)
    return _device_ids(ids, memory)


def _host_ids(ids: NDArray[Any]) -> NDArray[np.int64]:
    if ids.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    _require_rank(ids.shape)
    return ids


def _device_ids(ids: SupportsDlpack, memory: DeviceMemory) -> DeviceIds:
    try:
        value = OrtValue.from_dlpack(ids.__dlpack__(stream=memory.stream))
    except (RuntimeError, BufferError) as error:  # ONNX Runtime takes contiguous tensors of types that it knows
        raise ValueError(f"ids on a device must be contiguous int64; make them so first ({error})") from error
    if value.data_type() != "tensor(int64)":
        raise ValueError(f"ids on a device must be contiguous int64, got {value.data_type()}; convert them first")
    shape = _require_rank(value.shape())
    return DeviceIds(address=value.data_ptr(), shape=shape, num_bytes=value.tensor_size_in_bytes(), owner=value)


def _require_rank(shape: Sequence[int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"ids must be [rows, tokens], got {len(shape)} dimensions: {list(shape)}")
    return shape[0], shape[1]


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class DlpackTensor:
    """The first rows of a tensor of ours, as a DLPack producer. The memory lives as long as any consumer does."""

    def __init__(self, tensor: DeviceTensor, shape: tuple[int, ...], *, device: Device, device_id: int) -> None:
        self.shape = shape
        self._tensor = tensor
        self._device = (_DEVICES[device], device_id)

    def __dlpack_device__(self) -> tuple[int, int]:
        """See the protocol."""
        return self._device

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A capsule that shares the memory; the data is complete, so no stream has to wait.

        Raises BufferError when a copy, or another device, is asked for.
        """
        if copy:
            raise BufferError("these logits are shared, not copied: copy them with the library that takes them")
        if dl_device is not None and tuple(dl_device) != self._device:
            raise BufferError(f"these logits lie on DLPack device {self._device}, not on {tuple(dl_device)}")
        return _new_capsule(self._tensor, self.shape, self._device)


class _Held:
    """What a capsule needs: kept alive by a reference that `_release` gives up."""

    def __init__(self, tensor: DeviceTensor, shape: tuple[int, ...], device: tuple[int, int]) -> None:
        self.owner = tensor.owner
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.managed = _DLManagedTensor()
        code, bits = _DTYPES[tensor.dtype]
        self.managed.dl_tensor = _DLTensor(
            tensor.address, *device, len(shape), code, bits, 1, self.shape, ctypes.POINTER(ctypes.c_int64)(), 0
        )
        self.managed.manager_ctx = id(self)
        self.managed.deleter = ctypes.cast(_release, ctypes.c_void_p)


@ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))  # type: ignore[untyped-decorator]  # so ctypes is
def _release(managed: Any) -> None:  # noqa: ANN401 - a ctypes pointer
    held = ctypes.cast(managed.contents.manager_ctx, ctypes.py_object)
    ctypes.pythonapi.Py_DecRef(held)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # type: ignore[untyped-decorator]  # so ctypes is
def _release_unused(capsule: int) -> None:
    """A capsule's destructor: one that a consumer has taken bears another name, and the consumer releases it."""
    api = ctypes.pythonapi
    if api.PyCapsule_IsValid(ctypes.c_void_p(capsule), _CAPSULE):
        get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", api))
        _release(ctypes.cast(get(capsule, _CAPSULE), ctypes.POINTER(_DLManagedTensor)))


def _new_capsule(tensor: DeviceTensor, shape: tuple[int, ...], device: tuple[int, int]) -> object:
    held = _Held(tensor, shape, device)
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    capsule: object = new(ctypes.addressof(held.managed), _CAPSULE, ctypes.cast(_release_unused, ctypes.c_void_p))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    return capsule
