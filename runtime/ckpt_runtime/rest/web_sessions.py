"""Sessions of browsers: what a cookie holds, and whose it is. No token is in it, and none is kept for it.

A cookie's value names its end and a random id, signed with a key that is made up for each driver: it ends with the
driver, at the latest. Nothing is stored for a session, so logins in any number take no memory; of those that were ended
before their time the newest are remembered.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

LIFETIME_S = 12 * 3600
MAX_ENDED = 10_000
"""Sessions that were logged out and would still be valid, at most; beyond it the oldest of them is valid again."""

_VALUE = re.compile(r"([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})")


class WebSessions:
    """Gives out sessions and knows them again."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._key = secrets.token_bytes(32)
        self._clock = clock
        self._ended: OrderedDict[str, None] = OrderedDict()

    def begin(self) -> str:
        """Makes the value of a new cookie."""
        claim = f"{int(self._clock()) + LIFETIME_S}.{secrets.token_hex(16)}"
        return f"{claim}.{self._signature(claim)}"

    def is_valid(self, value: str) -> bool:
        """Tells whether this driver has given it out and it has not ended."""
        found = _VALUE.fullmatch(value)
        if found is None:
            return False
        end, session_id, signature = found.groups()
        signed = hmac.compare_digest(signature, self._signature(f"{end}.{session_id}"))
        return signed and self._clock() < int(end) and session_id not in self._ended

    def end(self, value: str) -> None:
        """From now on it is not valid; nothing happens with what is not."""
        if self.is_valid(value):
            self._ended[value.split(".")[1]] = None
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def _signature(self, claim: str) -> str:
        return hmac.new(self._key, claim.encode("ascii"), hashlib.sha256).hexdigest()


def cookie_name(host: str) -> str:
    """Names the cookie by the port: browsers send cookies of one host to all of its ports."""
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:
        port = None
    return f"ckpt-session-{port or 'default'}"


def is_same_origin(headers: Mapping[str, str]) -> bool:
    """Tells whether a page of this very server has sent the request, as the browser says; a program says nothing.

    Behind a proxy that changes ``Host`` only browsers that send ``Sec-Fetch-Site`` (over TLS, all of them) pass.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    # Compared as text: a header that is no URL, such as "http://[", cannot be taken apart.
    return origin is None or origin.partition("://")[2] == headers.get("host", "")
