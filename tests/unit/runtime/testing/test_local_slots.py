"""Slots as plain processes, with small scripts in the place of agents; and the cluster around them."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckpt_runtime.testing import mini_cluster
from ckpt_runtime.testing.mini_cluster import ClusterTimeoutError, LocalSlotProvider, MiniCluster

TIMEOUT_S = 60
Ended = "queue.Queue[tuple[str, BaseException | None]]"


@pytest.fixture
def use_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(body: str) -> None:
        script = tmp_path / "agent"
        script.write_text(
            f"#!{sys.executable} -IS\nimport json, os, signal, sys\nstart = json.load(sys.stdin)\n{body}\n"
        )
        script.chmod(0o755)
        monkeypatch.setattr(mini_cluster, "sys", SimpleNamespace(executable=str(script), path=sys.path))

    return use


def launch(*slots: str) -> tuple[LocalSlotProvider, Ended]:
    provider = LocalSlotProvider(start_agent=mini_cluster.spawned_agent)
    ended: Ended = queue.Queue()
    for slot in slots:
        provider.launch(slot, 1234, "secret", lambda slot, error: ended.put((slot, error)))
    return provider, ended


def test_agent_gets_its_parameters_and_a_normal_end_is_not_an_error(
    use_agent: Callable[[str], None], tmp_path: Path
) -> None:
    use_agent(f"json.dump(start, open({str(tmp_path)!r} + '/start.json', 'w'))")
    provider, ended = launch("5")
    assert ended.get(timeout=TIMEOUT_S) == ("5", None)
    assert json.loads((tmp_path / "start.json").read_text()) == {
        "driver_host": "127.0.0.1", "driver_port": 1234, "secret": "secret", "slot": "5",
        "log": {"format": "text", "session": ""},
    }  # fmt: skip
    assert provider.agent_pids() == []


def test_failing_agent_ends_only_its_own_slot(use_agent: Callable[[str], None]) -> None:
    use_agent("sys.exit(3) if start['slot'] == '1' else signal.pause()")
    provider, ended = launch("0", "1", "2")
    slot, error = ended.get(timeout=TIMEOUT_S)
    assert (slot, str(error)) == ("1", "the slot agent ended with 3")
    assert len(provider.agent_pids()) == 2
    provider.cancel("0")
    provider.cancel("unknown")
    slot, error = ended.get(timeout=TIMEOUT_S)
    assert (slot, str(error)) == ("0", "the slot agent ended with -9")
    provider.cancel("2")
    assert ended.get(timeout=TIMEOUT_S)[0] == "2"


def test_a_cluster_starts_without_slots_and_stops() -> None:
    with MiniCluster() as cluster:
        assert cluster.worker_pids() == []
        assert cluster.spare_pids() == []
        assert cluster.cluster.slots.total == 0


def test_wait_that_times_out_names_its_condition() -> None:
    with pytest.raises(ClusterTimeoutError, match=r"timed out after [0-9.]+ s waiting for the moon"):
        MiniCluster.wait_until(lambda: False, "the moon", timeout_s=0.02)
