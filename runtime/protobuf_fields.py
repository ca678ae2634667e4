"""Fields of a protobuf message as bytes, because the runtime does without the onnx package.

In: a field's number and value. Out: its bytes. Fields are read in `graph_file.py`; which there are is said by who
writes them.
"""


def number_field(number: int, value: int) -> bytes:
    """A field of a whole number from 0."""
    return _varint(number << 3) + _varint(value)


def bytes_field(number: int, payload: bytes) -> bytes:
    """A field of bytes, of a text, or of a message inside the message."""
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
