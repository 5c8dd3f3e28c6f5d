"""A backend is found by its name, imported when it is used, and added by a call of the registry."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import registry
from ckpt_runtime.state.backend import BackendParameters
from ckpt_runtime.state.errors import UnsupportedBackendError
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.state.registry import create_backend, register_backend
from tests.support.pipelines.file_backend import FileKeyedStateBackend

PARAMETERS = BackendParameters("op", KeyGroupRange(3, 5), 16, tempfile.mkdtemp)


def test_the_backend_gets_what_it_is_made_from() -> None:
    backend = create_backend("hashmap", PARAMETERS)
    assert isinstance(backend, MemoryKeyedStateBackend)
    assert (backend.uid, backend.key_groups, backend.max_parallelism) == ("op", KeyGroupRange(3, 5), 16)


def test_a_backend_that_was_registered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    register_backend("files", FileKeyedStateBackend)
    backend = create_backend("files", PARAMETERS)
    assert isinstance(backend, FileKeyedStateBackend)
    backend.close()


@pytest.mark.parametrize("name", ["memory", "tests.support.pipelines.file_backend:FileKeyedStateBackend", ""])
def test_unknown_backend_name_is_refused_and_imports_nothing(name: str) -> None:
    with pytest.raises(UnsupportedBackendError, match=r"state\.backend\.type.*is not available, use .*'hashmap'"):
        create_backend(name, PARAMETERS)


def test_the_registry_imports_no_backend() -> None:
    script = "import sys, ckpt_runtime.state.registry; print([m for m in sys.modules if 'state.memory' in m])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": "runtime"}, check=False
    )
    assert done.stdout == "[]\n", done.stderr
