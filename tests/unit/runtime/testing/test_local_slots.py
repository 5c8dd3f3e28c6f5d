"""Slots as plain processes, with small scripts in the place of agents; and the cluster around them."""

from __future__ import annotations

import json
import queue
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckpt_runtime.testing import local_slots
from ckpt_runtime.testing.local_slots import LocalSlotProvider
from ckpt_runtime.testing.mini_cluster import ClusterTimeoutError, MiniCluster

TIMEOUT_S = 60
Ended = "queue.Queue[tuple[int, BaseException | None]]"


@pytest.fixture
def use_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(body: str) -> None:
        script = tmp_path / "agent"
        script.write_text(
            f"#!{sys.executable} -IS\nimport json, os, signal, sys\nstart, index = json.load(sys.stdin)\n{body}\n"
        )
        script.chmod(0o755)
        monkeypatch.setattr(local_slots, "sys", SimpleNamespace(executable=str(script), path=sys.path))

    return use


def launch(slots: int) -> tuple[LocalSlotProvider, Ended]:
    provider = LocalSlotProvider(start_agent=local_slots.spawned_agent)
    ended: Ended = queue.Queue()
    provider.launch(5, slots, 1234, "secret", lambda stage, error: ended.put((stage, error)))
    return provider, ended


def test_each_agent_gets_its_parameters_and_a_good_end_is_no_error(
    use_agent: Callable[[str], None], tmp_path: Path
) -> None:
    use_agent(f"json.dump(start, open({str(tmp_path)!r} + f\"/{{index}}.json\", 'w'))")
    provider, ended = launch(2)
    assert ended.get(timeout=TIMEOUT_S) == (5, None)
    for index in range(2):
        assert json.loads((tmp_path / f"{index}.json").read_text()) == {
            "driver_host": "127.0.0.1", "driver_port": 1234, "secret": "secret", "stage_id": 5,
            "log": {"format": "text", "session": ""},
        }  # fmt: skip
    assert provider.agent_pids() == []


def test_one_that_fails_takes_the_others_along(use_agent: Callable[[str], None]) -> None:
    use_agent("sys.exit(3) if index == 1 else signal.pause()")
    provider, ended = launch(3)
    stage, error = ended.get(timeout=TIMEOUT_S)
    assert stage == 5
    assert "3" in str(error)
    assert provider.agent_pids() == []


def test_a_stage_can_be_cancelled(use_agent: Callable[[str], None]) -> None:
    use_agent("signal.pause()")
    provider, ended = launch(2)
    assert len(provider.agent_pids()) == 2
    provider.cancel(5)
    provider.cancel(99)
    assert isinstance(ended.get(timeout=TIMEOUT_S)[1], RuntimeError)


def test_a_cluster_starts_without_slots_and_stops() -> None:
    with MiniCluster() as cluster:
        assert cluster.worker_pids() == []
        assert cluster.spare_pids() == []
        assert cluster.cluster.slots.total == 0


def test_waiting_for_what_never_happens_names_it() -> None:
    with pytest.raises(ClusterTimeoutError, match=r"0\.02 s waiting for the moon"):
        MiniCluster.wait_until(lambda: False, "the moon", timeout_s=0.02)
