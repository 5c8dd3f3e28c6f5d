"""Keyed state backends by the name that ``state.backend.type`` gives them. A backend is imported when it is used."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

from ckpt_runtime.checkpoint.completed_checkpoint import HASHMAP
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend
from ckpt_runtime.state.errors import UnsupportedBackendError

BackendFactory: TypeAlias = Callable[[BackendParameters], KeyedStateBackend]


def _hashmap(parameters: BackendParameters) -> KeyedStateBackend:
    from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend

    incremental = Configuration(parameters.configuration).get(CheckpointingOptions.INCREMENTAL)
    return MemoryKeyedStateBackend(
        parameters.key_groups, parameters.max_parallelism, parameters.uid, incremental=incremental
    )


def _rocksdb(parameters: BackendParameters) -> KeyedStateBackend:
    if importlib.util.find_spec("rocksdict") is None:
        raise UnsupportedBackendError(
            f"state.backend.type: 'rocksdb' needs rocksdict, which {sys.executable} cannot import; "
            f"run: {sys.executable} -m pip install 'ckpt-runtime[rocksdb]'"
        )
    from ckpt_runtime.state.rocksdb.backend import RocksDBKeyedStateBackend

    return RocksDBKeyedStateBackend(parameters)


_FACTORIES: dict[str, BackendFactory] = {"hashmap": _hashmap, "rocksdb": _rocksdb}


def register_backend(name: str, factory: BackendFactory) -> None:
    """Registers this backend under ``name`` in this process.

    The mapping is explicit: no option names a module, so a configuration cannot cause an import.
    """
    _FACTORIES[name] = factory


def check_name(name: str) -> None:
    """Raises :class:`UnsupportedBackendError` when no backend has this name."""
    if name not in _FACTORIES:
        known = " or ".join(map(repr, sorted(_FACTORIES)))
        raise UnsupportedBackendError(f"state.backend.type: {name!r} is not available, use {known}")


def create_backend(name: str, parameters: BackendParameters) -> KeyedStateBackend:
    """An empty backend. Raises :class:`UnsupportedBackendError` when no backend has this name."""
    check_name(name)
    return _FACTORIES[name](parameters)


def described_states(name: str, uid: str, description: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The descriptors of an operator's states by name, read from the description in a handle of this backend.

    Raises CorruptStateError, and :class:`UnsupportedBackendError` for a backend with unknown descriptions.
    """
    if name == HASHMAP:
        from ckpt_runtime.state.memory.increments import described

        return described(uid, description).states
    if name != "rocksdb":
        raise UnsupportedBackendError(f"operator {uid!r}: what the state backend {name!r} wrote only its jobs can read")
    from ckpt_runtime.state.rocksdb.catalog import Catalog

    catalog = Catalog.from_json(uid, description)
    return {state: catalog[state].descriptor for state in catalog}


def warm_up() -> None:
    """Imports the modules that most jobs use: a spare worker does so in advance, so that recovery is faster.

    It imports the whole RocksDB backend except the few modules that load rocksdict.
    """
    import ckpt_runtime.state.memory.backend
    import ckpt_runtime.state.rocksdb.columnar_aggregates
    import ckpt_runtime.state.rocksdb.columnar_rows
    import ckpt_runtime.state.rocksdb.keyed_collections
    import ckpt_runtime.state.rocksdb.keyed_states
    import ckpt_runtime.state.rocksdb.stored_form
    import ckpt_runtime.state.rocksdb.stored_row_buffers  # noqa: F401
