"""Login sessions of browsers: the content of their cookies and its verification. Cookies never contain the token.

A cookie's value has its expiry and a random id, signed with a key that each driver generates: it is invalid after the
driver's end at the latest. Nothing is stored for a session, so any number of logins takes no memory; only the newest
sessions that were logged out before their expiry are remembered.
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
"""The most logged-out, unexpired sessions remembered; beyond this number the oldest one becomes valid again."""

_VALUE = re.compile(r"([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})")


class WebSessions:
    """Issues sessions and verifies them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._key = secrets.token_bytes(32)
        self._clock = clock
        self._ended: OrderedDict[str, None] = OrderedDict()

    def begin(self) -> str:
        """Make the value of a new cookie."""
        claim = f"{int(self._clock()) + LIFETIME_S}.{secrets.token_hex(16)}"
        return f"{claim}.{self._signature(claim)}"

    def is_valid(self, value: str) -> bool:
        """Whether this driver has issued the cookie and its session has not ended."""
        found = _VALUE.fullmatch(value)
        if found is None:
            return False
        end, session_id, signature = found.groups()
        signed = hmac.compare_digest(signature, self._signature(f"{end}.{session_id}"))
        return signed and self._clock() < int(end) and session_id not in self._ended

    def end(self, value: str) -> None:
        """Invalidate a session; an invalid value is ignored."""
        if self.is_valid(value):
            self._ended[value.split(".")[1]] = None
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def _signature(self, claim: str) -> str:
        return hmac.new(self._key, claim.encode("ascii"), hashlib.sha256).hexdigest()


def cookie_name(host: str) -> str:
    """The cookie's name, which contains the port, as browsers send the cookies of a host to all of its ports."""
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:
        port = None
    return f"ckpt-session-{port or 'default'}"


def is_same_origin(headers: Mapping[str, str]) -> bool:
    """Whether the browser's headers say that a page of this server sent the request; requests without them pass.

    Behind a proxy that changes ``Host``, only browsers that send ``Sec-Fetch-Site`` (over TLS, all of them) pass.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    # Compared as text, because a header that is not a URL, such as "http://[", cannot be parsed.
    return origin is None or origin.partition("://")[2] == headers.get("host", "")
