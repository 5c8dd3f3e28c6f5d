"""Which keys have values that nobody is to see, by their names: what people pass as a secret is called so. Pure.

Flink hides the keys of ``GlobalConfiguration.SENSITIVE_KEYS`` in the same way; this list has all of them and more.
"""

from __future__ import annotations

import re

MASK = "******"

_PARTS = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "credential",
    "apikey",
    "api-key",
    "access-key",
    "accesskey",
    "private-key",
    "privatekey",
    "service-key",
    "account.key",
    "auth-params",
    "basic-auth",
    "authorization",
    "jaas.config",
    "http-headers",
)
"""Anywhere in a key, in any case; ``_`` and ``.`` stand for ``-`` as well."""

_LAST_WORDS = frozenset({"key", "pass", "pwd", "auth", "sas"})
_WORDS = re.compile(r"[.\-_]+|(?<=[a-z])(?=[A-Z])")
_SPELT = "|".join(re.escape(part).replace(r"\-", "[-_.]?") for part in _PARTS)
_IN_TEXT = re.compile(
    rf"""(?ix) ( [\w.\-]* (?: {_SPELT} ) [\w.\-]* ["']? \s* [=:] \s* ["']? )
        (?! \*{{6}} ) (?: (?: bearer | basic ) \s+ )? [^\s"',;&}})\]]+ """
)
"""A key of a secret and its value, as ``key=value``, ``key: value`` or in JSON."""

_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/\-]{8,}=*")
_IN_URL = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]+(?=@)")


def is_secret_key(key: str) -> bool:
    """Whether the value of a key that the system does not know is hidden."""
    spelt = _WORDS.sub("-", key).lower()
    return any(part.replace(".", "-") in spelt for part in _PARTS) or spelt.rpartition("-")[2] in _LAST_WORDS


def shown(key: str, value: str) -> str:
    """The value for people to see: hidden, or without the user and password of a URL."""
    return MASK if is_secret_key(key) else without_credentials(value)


def without_secrets(text: str) -> str:
    """A text that user code may have written, such as a log, without the values of keys that name secrets.

    It finds what is written as ``key=value``, ``key: value`` or JSON, bearer tokens and passwords in URLs. A secret
    that nothing names as one cannot be found.
    """
    text = _BEARER.sub(rf"\1{MASK}", without_credentials(text))
    return _IN_TEXT.sub(rf"\1{MASK}", text)


def without_credentials(value: str) -> str:
    """The value with user and password of its URLs hidden."""
    return _IN_URL.sub(MASK, value)
