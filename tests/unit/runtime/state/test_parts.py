"""Parts of incremental snapshots in memory: what is damaged or forged is named, files of others are refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec import structs

from ckpt_runtime.checkpoint.completed_checkpoint import IncrementalKeyedStateHandle, StateFile
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.errors import CorruptStateError, UnsupportedBackendError
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.state.memory.parts import MAGIC, ROWS_WRITTEN, PartWriter
from ckpt_runtime.state.registry import described_states
from tests.support.inline_snapshots import handles_of, restore

ALL = KeyGroupRange(0, 7)
KEY, VALUE = pa.schema([("k", pa.int64())]), pa.schema([("v", pa.int64())])


@pytest.fixture
def handle() -> IncrementalKeyedStateHandle:
    """Of two parts."""
    backend = MemoryKeyedStateBackend(ALL, 8, "op", incremental=True)
    state = backend.value_state("s", KEY, VALUE)
    for number in (1, 2):
        for key in range(20 if number == 1 else 1):
            state.put((key,), (number,))
        (found,) = handles_of([backend], number=number)
        backend.notify_complete(number)
    assert isinstance(found, IncrementalKeyedStateHandle)
    return found


def restored(handle: IncrementalKeyedStateHandle) -> list[Any]:
    backend = MemoryKeyedStateBackend(ALL, 8, "op")
    restore(backend, [handle])
    state = backend.value_state("s", KEY, VALUE)
    return [state.get((key,)) for key in range(20)]


def test_a_state_is_restored_from_its_parts_and_described_without_them(handle: IncrementalKeyedStateHandle) -> None:
    assert restored(handle) == [(2,), *[(1,)] * 19]
    assert len(handle.files) == 2
    assert described_states("hashmap", "op", handle.description)["s"]["kind"] == "value"


def test_rows_of_several_batches_are_in_key_group_order_and_one_batch_says_which_groups_it_has() -> None:
    keys = np.arange(2 * ROWS_WRITTEN)
    written = PartWriter(io.BytesIO())
    for name, rows in (("large", keys), ("small", keys[:100])):
        written.begin(name, whole=True)
        written.write_rows(name, pa.table({"key.k": rows}), ALL, 8)
    large, small = ([(run.first, run.last) for run in section.rows] for section in written.footer.sections)
    assert len(large) == 2
    assert large[0][0] == 0 < large[0][1] <= large[1][0] < large[1][1] == 7
    assert small == [(0, 7)]


def footer(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    """Changes the footer of a part."""

    def changed(content: bytes) -> bytes:
        size = int.from_bytes(content[-16:-8], "little")
        document = json.loads(content[-16 - size : -16])
        change(document)
        written = json.dumps(document).encode()
        return content[: -16 - size] + written + len(written).to_bytes(8, "little") + MAGIC

    return changed


def first_run(document: Any) -> list[int]:
    found: list[int] = document["sections"][0]["rows"][0]
    return found


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "no part of an incremental snapshot"),
        (lambda content: content[:-1], "no part of an incremental snapshot"),
        (lambda content: (1 << 60).to_bytes(8, "little") + MAGIC, "no part of an incremental snapshot"),
        (lambda content: b"x" + (1).to_bytes(8, "little") + MAGIC, "the footer of part .* cannot be read"),
        (footer(lambda document: document.update(version=2)), "has version 2, this release reads 1"),
        (footer(lambda document: document.update(sections=7)), "the footer of part .* cannot be read"),
        (footer(lambda document: first_run(document).__setitem__(2, 1 << 40)), "a batch of the key groups"),
        (footer(lambda document: first_run(document).__setitem__(1, 1 << 40)), "bytes at 0, not"),
        (footer(lambda document: first_run(document).__setitem__(0, 8)), "a block of state 's' cannot be read"),
    ],
)
def test_a_damaged_part_is_named(
    handle: IncrementalKeyedStateHandle, damage: Callable[[bytes], bytes], message: str
) -> None:
    name, file = next(iter(handle.files.items()))
    content = damage(file.inline or b"")
    files = {**handle.files, name: StateFile("", len(content), "", content)}
    with pytest.raises(CorruptStateError, match=message):
        restored(structs.replace(handle, files=files))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": [["gone", 0, 7]]}, "'op': the snapshot has no file of its part 'gone'"),
        ({"parts": None}, "the description of the state of operator 'op' cannot be read"),
        ({"states": {"s": {"format": 1, "kind": "unknown"}}}, "unknown kind"),
    ],
)
def test_a_forged_description_is_named(
    handle: IncrementalKeyedStateHandle, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CorruptStateError, match=message):
        restored(structs.replace(handle, description={**handle.description, **change}))


def test_files_of_another_backend_are_refused(handle: IncrementalKeyedStateHandle) -> None:
    with pytest.raises(UnsupportedBackendError, match="was written by the backend 'rocksdb'"):
        restored(structs.replace(handle, backend="rocksdb"))
