"""The files of a simulated world: an object store in a dictionary, reached through fsspec as every store is.

Each access may fail, before or after it took effect. Deletions are watched: nothing that a retained checkpoint refers
to may go.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, ClassVar
from uuid import UUID

from fsspec import AbstractFileSystem, register_implementation

from ckpt_runtime.storage import state_files

PROTOCOL = "simulated"
ROOT = f"{PROTOCOL}://jobs"


class FileStore:
    """Content by path. ``fails(operation)`` decides faults, ``deleting(path)`` is called before a file goes.

    A write that is ``in_transit`` was given up by its client, and takes effect when the store gets to it. While the
    store is ``away`` it looks as a mount does that is missing: there is nothing, and nothing can be written.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.directories: set[str] = set()
        self.in_transit: list[tuple[str, bytes]] = []
        self.away = False
        self.fails: Callable[[str], bool] = lambda _: False
        self.deleting: Callable[[str], None] = lambda _: None
        self.may_land_late: Callable[[str], bool] = lambda _: False

    def make_directories(self, path: str) -> None:
        """With all above it."""
        while path:
            self.directories.add(path)
            path = path.rpartition("/")[0]

    def check_there(self, path: str) -> None:
        if self.away:
            raise FileNotFoundError(path)

    def put(self, path: str, content: bytes) -> None:
        self.check_there(path)
        if self.fails("write fails"):
            raise OSError(f"simulated: {path} was not written")
        if self.may_land_late(path) and self.fails("write lands late"):
            self.in_transit.append((path, content))
            raise OSError(f"simulated: no answer to the write of {path}")
        self.files[path] = content
        if self.fails("write answers with an error"):
            raise OSError(f"simulated: unknown whether {path} was written")

    def land(self) -> None:
        """The oldest write in transit takes effect."""
        path, content = self.in_transit.pop(0)
        self.files[path] = content

    def delete(self, path: str) -> None:
        if self.away or path not in self.files:
            raise FileNotFoundError(path)
        if self.fails("deletion fails"):
            raise OSError(f"simulated: {path} was not deleted")
        self.deleting(path)
        del self.files[path]

    def below(self, directory: str) -> list[str]:
        """Files that can be seen."""
        prefix = directory.rstrip("/") + "/"
        return [] if self.away else [path for path in self.files if path.startswith(prefix)]


class _Written(io.BytesIO):
    """A file being written; it exists once it is closed."""

    def __init__(self, store: FileStore, path: str) -> None:
        super().__init__()
        self._store = store
        self._path = path

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            self._store.put(self._path, content)


class _Single(type(AbstractFileSystem)):  # type: ignore[misc]
    """Makes one object for all: fsspec's own cache of objects takes more time than what is done with them here."""

    _made: Any = None

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if cls._made is None:
            cls._made = super().__call__(*arguments, **options)
        return cls._made


class SimulatedFileSystem(AbstractFileSystem, metaclass=_Single):
    """See the module. ``store`` is the running schedule's."""

    protocol = PROTOCOL
    store: ClassVar[FileStore] = FileStore()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix(f"{PROTOCOL}://").rstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(_path: str) -> dict[str, Any]:
        return {}

    def open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        if mode == "rb":
            return io.BytesIO(self._content(path))
        return _Written(self.store, self._strip_protocol(path))

    def _content(self, path: str) -> bytes:
        path = self._strip_protocol(path)
        if self.store.away or path not in self.store.files or self.store.fails("read misses the file"):
            raise FileNotFoundError(path)
        if self.store.fails("read fails"):
            raise OSError(f"simulated: {path} cannot be read")
        return self.store.files[path]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return self._content(path)[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._strip_protocol(path)
        if mode == "create" and path in self.store.files:
            raise FileExistsError(path)
        self.store.put(path, bytes(value))

    def size(self, path: str) -> int:
        return len(self._content(path))

    def exists(self, path: str, **_: Any) -> bool:
        path = self._strip_protocol(path)
        return not self.store.away and (path in self.store.files or self.isdir(path))

    def isdir(self, path: str) -> bool:
        path = self._strip_protocol(path)
        return not self.store.away and (path in self.store.directories or bool(self.store.below(path)))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.store.check_there(path)
        self.store.make_directories(self._strip_protocol(path))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        directory = self._strip_protocol(path).rstrip("/")
        found = {
            f"{directory}/{name[len(directory) + 1 :].split('/')[0]}": None for name in self.store.below(directory)
        }
        if not found and not self.isdir(directory):
            raise FileNotFoundError(path)
        return [{"name": name} for name in found] if detail else list(found)

    def rm_file(self, path: str) -> None:
        self.store.delete(self._strip_protocol(path))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        self.store.check_there(path)
        for name in self.store.below(path):
            self.store.delete(name)
        gone = {name for name in self.store.directories if f"{name}/".startswith(f"{path}/")}
        self.store.directories -= gone

    def rmdir(self, path: str) -> None:
        self.store.check_there(path)
        self.store.directories.discard(self._strip_protocol(path))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Nothing is cached."""


@contextmanager
def counted_names() -> Iterator[None]:
    """State files get names by number instead of random ones, which would make each run of a seed another one."""
    numbers = count(1)
    names = vars(state_files)
    known = names["uuid4"]
    names["uuid4"] = lambda: UUID(int=next(numbers))
    try:
        yield
    finally:
        names["uuid4"] = known


register_implementation(PROTOCOL, SimulatedFileSystem, clobber=True)
