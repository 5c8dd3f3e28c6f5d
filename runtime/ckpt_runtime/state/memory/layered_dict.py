"""A dict that can be frozen in constant time: frozen layers below, one writable layer on top.

Reads look from the top down; a deletion in an upper layer is a tombstone. Once no frozen view is in use,
upper layers are merged back into the lowest one a few entries at a time (:meth:`LayeredDict.maintain`), so that
neither taking nor releasing a snapshot stalls the owner. One thread owns the dict; any thread may read or release a
frozen view. Values are never None. Mutable values (lists, dicts) are changed through :meth:`LayeredDict.writable`
only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

CHUNK = 10_000
# A read may have to look at each of them.
_MAX_LAYERS = 4
_TOMBSTONE: Any = object()


class FrozenView(Generic[K, V]):
    """The entries as of one moment. ``release`` may be called from any thread."""

    def __init__(self, layers: tuple[dict[K, V], ...]) -> None:
        self._layers = layers
        self.released = False

    def chunks(self, size: int = CHUNK) -> Iterator[list[tuple[K, V]]]:
        """All entries, up to ``size`` at a time, so that the interpreter lock is released in between."""
        for position in range(len(self._layers)):
            entries = iter(self._layers[position].items())
            above = self._layers[position + 1 :]
            while chunk := list(islice(entries, size)):
                if len(self._layers) > 1:
                    chunk = [
                        (key, value)
                        for key, value in chunk
                        if value is not _TOMBSTONE and not any(key in layer for layer in above)
                    ]
                if chunk:
                    yield chunk

    def release(self) -> None:
        """Releases the layers, which the owner may change again."""
        self._layers = ()
        self.released = True


class LayeredDict(Generic[K, V]):
    """See the module docstring."""

    def __init__(self) -> None:
        self._layers: list[dict[K, V]] = [{}]
        self._views: list[FrozenView[K, V]] = []

    def get(self, key: K) -> V | None:
        """The value, or None."""
        layers = self._layers
        if len(layers) == 1:
            return layers[0].get(key)
        for layer in reversed(layers):
            value = layer.get(key)
            if value is not None:
                return None if value is _TOMBSTONE else value
        return None

    def put(self, key: K, value: V) -> None:
        """Sets the value."""
        layers = self._layers
        if len(layers) == 1:
            layers[0][key] = value
        elif self._views:
            layers[-1][key] = value
        else:
            # No view shows the layers: write to the bottom layer, and remove entries above that would hide it.
            for layer in layers[1:]:
                layer.pop(key, None)
            layers[0][key] = value

    def remove(self, key: K) -> None:
        """Removes the entry if there is one."""
        if self._views:
            if self.get(key) is not None:
                self._layers[-1][key] = _TOMBSTONE
            return
        for layer in self._layers:
            layer.pop(key, None)

    def writable(self, key: K, copy: Callable[[V], V]) -> V | None:
        """The value, to be changed in place; copied first when a frozen view still shows it."""
        layers = self._layers
        if len(layers) == 1 or not self._views:
            return self.get(key)
        value = layers[-1].get(key)
        if value is not None:
            return None if value is _TOMBSTONE else value
        value = self.get(key)
        if value is None:
            return None
        value = copy(value)
        layers[-1][key] = value
        return value

    def freeze(self) -> FrozenView[K, V]:
        """A view of the present entries, in constant time."""
        self._forget_released()
        # Nothing has changed since the last view: do not add a second empty layer.
        if len(self._layers) > 1 and not self._layers[-1]:
            view = FrozenView(tuple(self._layers[:-1]))
        else:
            view = FrozenView(tuple(self._layers))
            if len(self._layers) >= _MAX_LAYERS:
                self._layers = [self._layers[0], self._collapsed()]
            self._layers.append({})
        self._views.append(view)
        return view

    def _collapsed(self) -> dict[K, V]:
        """The upper layers as one new dict, so that overlapping snapshots do not pile up layers; old layers stay."""
        merged: dict[K, V] = {}
        for layer in self._layers[1:]:
            merged.update(layer)
        return merged

    def maintain(self, budget: int) -> bool:
        """Merges up to ``budget`` entries back; returns True when there is more to merge."""
        if len(self._layers) == 1:
            return False
        self._forget_released()
        if self._views:
            return False
        base = self._layers[0]
        while len(self._layers) > 1 and budget > 0:
            layer = self._layers[1]
            while layer and budget > 0:
                # The entry is removed as it is moved, so that each is in one layer wherever the budget ends.
                key, value = layer.popitem()
                if value is _TOMBSTONE:
                    base.pop(key, None)
                else:
                    base[key] = value
                budget -= 1
            if not layer:
                del self._layers[1]
        return len(self._layers) > 1

    def _forget_released(self) -> None:
        self._views = [view for view in self._views if not view.released]
