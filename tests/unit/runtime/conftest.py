"""What holds for the tests of the engine's modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckpt_runtime.storage.filesystem import memory_allowed


@pytest.fixture(scope="module", autouse=True)
def memory_is_a_place() -> Iterator[None]:
    """As it is in no session."""
    with memory_allowed():
        yield
