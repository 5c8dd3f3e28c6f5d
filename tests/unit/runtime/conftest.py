"""What holds for the tests of the engine's modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from ckpt_runtime.processes.limited_process import drop_templates, keep_templates
from ckpt_runtime.storage.filesystem import Location, delete_tree, make_directory, memory_allowed, resolve
from tests.support.object_store import IMPATIENT_S, ObjectStore, object_store


@pytest.fixture(scope="module", autouse=True)
def memory_is_a_place() -> Iterator[None]:
    """As it is in no session."""
    with memory_allowed():
        yield


@pytest.fixture(scope="module")
def process_template() -> Iterator[None]:
    """The limited processes of a module are forked, as those of a driver are; otherwise each imports everything."""
    keep_templates()
    yield
    drop_templates()


@pytest.fixture(scope="package")
def s3() -> Iterator[ObjectStore]:
    with object_store(IMPATIENT_S) as started:
        yield started


@pytest.fixture(scope="package")
def bucket(s3: ObjectStore) -> str:
    return s3.bucket()


@pytest.fixture(params=["local", "memory", "s3"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Location]:
    """A directory of each kind, and empty."""
    match request.param:
        case "local":
            location = resolve(tmp_path / "base")
        case "memory":
            location = resolve(f"memory://{uuid4().hex}")
        case _:
            location = resolve(f"{request.getfixturevalue('bucket')}/{uuid4().hex}")
    make_directory(location)
    yield location
    delete_tree(location)
