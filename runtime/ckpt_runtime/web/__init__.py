"""The pages that browsers load to show a session: HTML, CSS and modules of JavaScript, without a build step or library.

Text becomes a text node; markup is never parsed, which the browser's policy enforces (``require-trusted-types-for``).
They have no inline code and load nothing from another origin. Addresses are relative, so the pages work below any path.
A field that a Flink cluster lacks may be missing. The pages change nothing but the login.

This module only reads the files and makes the headers that they are sent with. It knows no path of an API: the pages
find the API at ``../`` of their own path.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

INDEX = "index.html"
_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file; ``tag`` is another for another content."""

    content: bytes
    media_type: str
    tag: str

    def headers(self, *, may_be_framed: bool = False) -> dict[str, str]:
        """Makes the headers that it is sent with. ``may_be_framed`` lets pages of the same origin show it inside of
        theirs.
        """
        ancestors = "'self'" if may_be_framed else "'none'"
        return {
            "Content-Type": self.media_type,
            "Content-Security-Policy": f"{_POLICY}; frame-ancestors {ancestors}",
            "Cache-Control": "no-cache",
            "ETag": self.tag,
            "Referrer-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
        }


@cache
def page_files() -> Mapping[str, PageFile]:
    """Gives all files by name; each is read once."""
    found = {}
    for entry in files("ckpt_runtime.web").joinpath("static").iterdir():
        media_type = _MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None and entry.is_file():
            content = entry.read_bytes()
            found[entry.name] = PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found
