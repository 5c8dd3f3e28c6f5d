"""Recognises by their names the keys whose values are secret. Pure.

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
    "key.pem",
    "account.key",
    "auth-params",
    "basic-auth",
    "authorization",
    "jaas.config",
    "http-headers",
)
"""Matched anywhere in a key, in any case; ``_`` and ``.`` also match ``-``."""

_LAST_WORDS = frozenset({"key", "pass", "pwd", "auth", "sas"})
_WORDS = re.compile(r"[.\-_]+|(?<=[a-z])(?=[A-Z])")
_SPELT = "|".join(re.escape(part).replace(r"\-", "[-_.]?") for part in _PARTS)
_IN_TEXT = re.compile(
    rf"""(?ix) ( [\w.\-]* (?: {_SPELT} ) [\w.\-]* ["']? \s* [=:] \s* ["']? )
        (?! \*{{6}} ) (?: (?: bearer | basic ) \s+ )? [^\s"',;&}})\]]+ """
)
"""Matches a secret key with its value, as ``key=value``, ``key: value`` or in JSON."""

_BEARER = re.compile(r"(?i)\b(bearer\s+)[\w.~+/\-]{8,}=*")
_IN_URL = re.compile(r"(?<=://)[^/@\s:]*:[^/@\s]+(?=@)")


def is_secret_key(key: str) -> bool:
    """Whether the value of this key, which need not be a known option, is hidden."""
    spelt = _WORDS.sub("-", key).lower()
    return any(part.replace(".", "-") in spelt for part in _PARTS) or spelt.rpartition("-")[2] in _LAST_WORDS


def shown(key: str, value: str) -> str:
    """The value as users may see it: hidden, or without the user and password of a URL."""
    return MASK if is_secret_key(key) else without_credentials(value)


def without_secrets(text: str) -> str:
    """The text, such as a log with output of user code, without the values of secret keys.

    It hides values written as ``key=value``, ``key: value`` or JSON, bearer tokens, and passwords in URLs. A secret
    without such a name cannot be recognised.
    """
    text = _BEARER.sub(rf"\1{MASK}", without_credentials(text))
    return _IN_TEXT.sub(rf"\1{MASK}", text)


def without_credentials(value: str) -> str:
    """The value with user and password of its URLs hidden."""
    return _IN_URL.sub(MASK, value)
