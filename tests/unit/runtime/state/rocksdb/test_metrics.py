"""What a database says of itself: what is asked for, true figures, and none before its beginning and after its end."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest

from ckpt_runtime.configuration.option import InvalidOptionError
from ckpt_runtime.configuration.state_options import rocksdb_metrics
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend
from ckpt_runtime.state.registry import create_backend
from tests.support.inline_snapshots import CHECKPOINT, written

KEY = pa.schema([("k", pa.int64())])
PREFIX = "state.backend.rocksdb.metrics."


def backend(directory: Path, *names: str, value: str = "true") -> KeyedStateBackend:
    groups, options = KeyGroupRange(0, 127), {PREFIX + name: value for name in names}
    parameters = BackendParameters("op", groups, 128, lambda: tempfile.mkdtemp(dir=directory), options)
    return create_backend("rocksdb", parameters)


def test_every_metric_has_a_figure_while_the_database_is_open(tmp_path: Path) -> None:
    made = backend(tmp_path, *rocksdb_metrics())
    assert made.metrics() == {}
    state = made.value_state("v", KEY, pa.schema([("x", pa.string())]))
    for number in range(500):
        state.put((number,), ("x" * 100,))
    before = made.metrics()
    assert before.keys() == {f"rocksdb.{name}" for name in rocksdb_metrics()}
    written(made.snapshot(1, CHECKPOINT))
    after = made.metrics()
    assert after["rocksdb.estimate-num-keys"] == 500
    assert after["rocksdb.total-sst-files-size"] > before["rocksdb.total-sst-files-size"] == 0
    assert after["rocksdb.block-cache-usage"] > 0
    assert after["rocksdb.background-errors"] == 0
    made.close()
    assert made.metrics() == {}


def test_metrics_that_were_not_requested_are_absent(tmp_path: Path) -> None:
    made, silent = backend(tmp_path, "estimate-num-keys"), backend(tmp_path)
    for each in (made, silent):
        each.value_state("v", KEY, KEY)
    assert (made.metrics(), silent.metrics()) == ({"rocksdb.estimate-num-keys": 0}, {})
    made.close()
    silent.close()


def test_a_metric_is_on_or_off(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=r"estimate-num-keys.*maybe"):
        backend(tmp_path, "estimate-num-keys", value="maybe")
