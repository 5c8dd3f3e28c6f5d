"""The files of Flink's own dashboard, out of a Flink distribution that the user has: none of them is ours.

Everything is read once, within limits; later changes of the distribution are not seen. It serves nothing.
"""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_runtime.configuration.errors import InvalidOptionError
from ckpt_runtime.configuration.rest_options import RestOptions

MAX_FILES = 5_000
MAX_BYTES = 64 << 20

_INDEX = "index.html"
_IN_JAR = "web/"
_JARS = ("flink-dist*.jar", "flink-runtime-web*.jar")
_ALLOWED = (
    "a Flink distribution, its flink-dist or flink-runtime-web jar, or a folder with the dashboard's index.html, of at "
    f"most {MAX_FILES} files and {MAX_BYTES >> 20} MiB"
)
_INLINE = re.compile(rb'\son[a-z]+="([^"]*)"|<script(?:\s[^>]*)?>([^<]+)</script>')


@dataclass(frozen=True, slots=True)
class DashboardFile:
    """One file with its media type."""

    content: bytes
    media_type: str


class FlinkDashboard:
    """The files by name."""

    def __init__(self, files: dict[str, DashboardFile]) -> None:
        self._files = files
        self._policy = _policy_for(files[_INDEX].content)

    @classmethod
    def of(cls, place: str) -> FlinkDashboard:
        """Reads them. Raises InvalidOptionError for a place that has none."""
        try:
            files = dict(_read(Path(place)))
        except (OSError, zipfile.BadZipFile, ValueError):
            files = {}
        if _INDEX not in files:
            raise InvalidOptionError(RestOptions.FLINK_DASHBOARD.key, place, _ALLOWED)
        return cls(files)

    def find(self, name: str) -> DashboardFile | None:
        """Gives one; the empty name is the first page."""
        return self._files.get(name or _INDEX)

    def headers(self, file: DashboardFile) -> dict[str, str]:
        """Makes what it is sent with: a policy as strict as the dashboard bears, and no frames."""
        return {
            "Content-Type": file.media_type,
            "Content-Security-Policy": self._policy,
            "Cache-Control": "no-cache",
            "X-Content-Type-Options": "nosniff",
        }


def _policy_for(index: bytes) -> str:
    """Only those inline scripts run that the distribution's own first page has."""
    inline = [handler or script for handler, script in _INLINE.findall(index)]
    hashes = sorted({base64.b64encode(hashlib.sha256(text).digest()).decode() for text in inline})
    scripts = " ".join(["'self'", "'unsafe-hashes'", *(f"'sha256-{value}'" for value in hashes)])
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "font-src 'self' data:; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; "
        "frame-ancestors 'none'"
    )


def _read(place: Path) -> Iterator[tuple[str, DashboardFile]]:
    if place.is_file():
        yield from _bounded(_of_jar(place))
    elif (place / _INDEX).is_file():
        yield from _bounded(_of_folder(place))
    else:
        for pattern in _JARS:
            for jar in sorted((*place.glob(f"lib/{pattern}"), *place.glob(pattern))):
                yield from _bounded(_of_jar(jar))
                return


def _of_jar(jar: Path) -> Iterator[tuple[str, int, bytes]]:
    with zipfile.ZipFile(jar) as archive:
        for entry in archive.infolist():
            if entry.filename.startswith(_IN_JAR) and not entry.is_dir():
                if entry.file_size > MAX_BYTES:
                    raise ValueError(entry.filename)
                yield entry.filename.removeprefix(_IN_JAR), entry.file_size, archive.read(entry)


def _of_folder(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            size = path.stat().st_size
            if size > MAX_BYTES:
                raise ValueError(path.name)
            yield path.relative_to(folder).as_posix(), size, path.read_bytes()


def _bounded(entries: Iterator[tuple[str, int, bytes]]) -> Iterator[tuple[str, DashboardFile]]:
    total = 0
    for number, (name, size, content) in enumerate(entries, start=1):
        total += size
        if number > MAX_FILES or total > MAX_BYTES:
            raise ValueError(name)
        yield name, DashboardFile(content, _media_type(name))


def _media_type(name: str) -> str:
    if name.endswith(".js"):
        return "text/javascript; charset=utf-8"
    found = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"{found}; charset=utf-8" if found.startswith("text/") else found
