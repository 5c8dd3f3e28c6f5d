"""Java serialization of one exception, just enough for Flink's command line to print a failure.

Flink's client reads a failed operation's ``serialized-throwable`` as a Java object stream that holds an
``org.apache.flink.util.SerializedThrowable``. This builds that stream (Java Object Serialization protocol 5) from
texts. It only ever writes; nothing in the project reads such streams.
"""

from __future__ import annotations

import struct
from base64 import b64encode

_STREAM_HEADER = struct.pack(">HH", 0xACED, 5)
_TC_NULL, _TC_OBJECT, _TC_CLASSDESC = b"\x70", b"\x73", b"\x72"
_TC_STRING, _TC_LONGSTRING, _TC_END_BLOCK = b"\x74", b"\x7c", b"\x78"
_TC_REFERENCE = b"\x71"
_FIRST_HANDLE = 0x7E0000
_SERIALIZABLE, _SERIALIZABLE_WITH_WRITE_METHOD = 2, 3
_MAX_CHARS = 64 * 1024

_THROWABLE = ("java.lang.Throwable", -3042686055658047285, _SERIALIZABLE_WITH_WRITE_METHOD)
_EXCEPTION = ("java.lang.Exception", -3387516993124229948, _SERIALIZABLE)
_SERIALIZED_THROWABLE = ("org.apache.flink.util.SerializedThrowable", 7284183123441947635, _SERIALIZABLE)


def serialized_throwable(exception: str, message: str, stack_trace: str) -> str:
    """The stream in Base64. ``exception`` is shown as the error's class, ``stack_trace`` as its full text."""
    return b64encode(_stream(exception, message, stack_trace)).decode("ascii")


def _stream(exception: str, message: str, stack_trace: str) -> bytes:
    handles: dict[str, int] = {}
    out = [_STREAM_HEADER, _TC_OBJECT]
    out.append(
        _class_description(
            _SERIALIZED_THROWABLE,
            [
                ("originalErrorClassName", "Ljava/lang/String;"),
                ("fullStringifiedStackTrace", "Ljava/lang/String;"),
                ("serializedException", "[B"),
            ],
            handles,
        )
    )
    out.append(_class_description(_EXCEPTION, [], handles))
    out.append(
        _class_description(
            _THROWABLE,
            [
                ("cause", "Ljava/lang/Throwable;"),
                ("detailMessage", "Ljava/lang/String;"),
                ("stackTrace", "[Ljava/lang/StackTraceElement;"),
                ("suppressedExceptions", "Ljava/util/List;"),
            ],
            handles,
        )
    )
    out.append(_TC_NULL)  # Throwable's superclass is not serializable
    out += [_TC_NULL, _string(message), _TC_NULL, _TC_NULL, _TC_END_BLOCK]
    out += [_string(exception), _string(stack_trace), _TC_NULL]
    return b"".join(out)


def _class_description(identity: tuple[str, int, int], fields: list[tuple[str, str]], handles: dict[str, int]) -> bytes:
    """Write a class description without the superclass, which follows; repeated type names are references."""
    name, uid, flags = identity
    out = [_TC_CLASSDESC, _utf(name), struct.pack(">qBH", uid, flags, len(fields))]
    _assign(name, handles)
    for field, type_name in fields:
        out.append(type_name[:1].encode("ascii") + _utf(field))
        if type_name in handles:
            out.append(_TC_REFERENCE + struct.pack(">I", handles[type_name]))
        else:
            out.append(_TC_STRING + _utf(type_name))
            _assign(type_name, handles)
    out.append(_TC_END_BLOCK)
    return b"".join(out)


def _assign(name: str, handles: dict[str, int]) -> None:
    handles[name] = _FIRST_HANDLE + len(handles)


def _utf(text: str) -> bytes:
    encoded = _modified_utf8(text)
    return struct.pack(">H", len(encoded)) + encoded


def _string(text: str) -> bytes:
    encoded = _modified_utf8(text[:_MAX_CHARS])
    if len(encoded) <= 0xFFFF:
        return _TC_STRING + struct.pack(">H", len(encoded)) + encoded
    return _TC_LONGSTRING + struct.pack(">Q", len(encoded)) + encoded


def _modified_utf8(text: str) -> bytes:
    """Encode in Java's modified UTF-8: each UTF-16 code unit separately, and NUL as two bytes."""
    units = text.encode("utf-16-be", "surrogatepass")
    out = bytearray()
    for (unit,) in struct.iter_unpack(">H", units):
        if 1 <= unit <= 0x7F:
            out.append(unit)
        elif unit <= 0x7FF:
            out += bytes((0xC0 | unit >> 6, 0x80 | unit & 0x3F))
        else:
            out += bytes((0xE0 | unit >> 12, 0x80 | unit >> 6 & 0x3F, 0x80 | unit & 0x3F))
    return bytes(out)
