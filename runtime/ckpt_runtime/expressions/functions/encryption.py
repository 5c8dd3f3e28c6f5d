"""``aes_encrypt`` and ``aes_decrypt``: AES in the modes GCM, CBC and ECB, with Spark's layout of the result.

The random bytes with which GCM and CBC start come first, then the encrypted ones; GCM adds sixteen bytes by which it
notices a wrong key or a changed text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.evaluation import Evaluator, Frame, Value, broadcast, function
from ckpt_runtime.expressions.nodes import Call
from ckpt_runtime.expressions.types import EvaluationError, UnsupportedExpressionError

_START = {"GCM": 12, "CBC": 16, "ECB": 0}
"""How many random bytes a mode starts with."""
_PADDINGS = {"GCM": ("NONE", "DEFAULT"), "CBC": ("PKCS", "DEFAULT"), "ECB": ("PKCS", "DEFAULT")}
_PARAMETER = "INVALID_PARAMETER_VALUE"


def _checked(key: bytes, mode: str, padding: str, start: bytes, more: bytes) -> str:
    """Returns the mode in capitals. Raises EvaluationError for arguments that Spark refuses."""
    mode = mode.upper()
    if padding.upper() not in _PADDINGS.get(mode, ()):
        raise EvaluationError("UNSUPPORTED_FEATURE.AES_MODE", f"AES-{mode} with the padding {padding} is not supported")
    if len(key) not in (16, 24, 32):
        raise EvaluationError(f"{_PARAMETER}.AES_KEY_LENGTH", f"the key has {len(key)} bytes, not 16, 24 or 32")
    if start and mode == "ECB":
        raise EvaluationError("UNSUPPORTED_FEATURE.AES_MODE_IV", "AES-ECB takes no initialization vector")
    if start and len(start) != _START[mode]:
        raise EvaluationError(
            f"{_PARAMETER}.AES_IV_LENGTH",
            f"the initialization vector has {len(start)} bytes, and {mode} needs {_START[mode]}",
        )
    if more and mode != "GCM":
        raise EvaluationError("UNSUPPORTED_FEATURE.AES_MODE_AAD", f"AES-{mode} takes no additional authenticated data")
    return mode


def _encrypt(
    random_bytes: Callable[[int], bytes] | None,
    text: bytes,
    key: bytes,
    mode: str,
    padding: str,
    start: bytes,
    more: bytes,
) -> bytes:
    from cryptography.hazmat.primitives.ciphers import aead
    from cryptography.hazmat.primitives.padding import PKCS7

    mode = _checked(key, mode, padding, start, more)
    if not start and _START[mode]:
        assert random_bytes is not None
        start = random_bytes(_START[mode])  # not the same for equal texts
    if mode == "GCM":
        encrypted: bytes = aead.AESGCM(key).encrypt(start, text, more)
        return start + encrypted
    padder, encryptor = PKCS7(128).padder(), _cipher(key, start).encryptor()
    encrypted = encryptor.update(padder.update(text) + padder.finalize()) + encryptor.finalize()
    return start + encrypted


def _decrypt(text: bytes, key: bytes, mode: str, padding: str, more: bytes) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import aead
    from cryptography.hazmat.primitives.padding import PKCS7

    mode = _checked(key, mode, padding, b"", more)
    start, text = text[: _START[mode]], text[_START[mode] :]
    try:
        if mode == "GCM":
            return aead.AESGCM(key).decrypt(start, text, more)
        unpadder, decryptor = PKCS7(128).unpadder(), _cipher(key, start).decryptor()
        return unpadder.update(decryptor.update(text) + decryptor.finalize()) + unpadder.finalize()
    except (InvalidTag, ValueError):
        raise EvaluationError(
            f"{_PARAMETER}.AES_CRYPTO_ERROR", "the bytes cannot be decrypted with this key and mode"
        ) from None


def _cipher(key: bytes, start: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.CBC(start) if start else modes.ECB())


@function("AesEncrypt", "AesDecrypt")
def _aes(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    if find_spec("cryptography") is None:
        problem = "it needs a library where programs are planned and run: pip install 'ckpt-runtime[aes]'"
        raise UnsupportedExpressionError(f"the function {call.function}", problem)
    encrypts = call.function == "AesEncrypt"

    def run(frame: Frame) -> Value:
        columns = [broadcast(argument(frame), frame.length).to_pylist() for argument in arguments]
        compute: Callable[..., bytes] = partial(_encrypt, frame.random_bytes) if encrypts else _decrypt
        rows = zip(*columns, strict=True)
        return pa.array([None if None in row else compute(*row) for row in rows], pa.binary())

    return run
