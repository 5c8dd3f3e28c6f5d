"""``ckpt config`` against a served application: what it prints, what it changes, how it ends."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from ckpt_runtime.configuration.configuration import ChangeNote, Configuration
from tests.unit.runtime.cli.test_commands import JOB, Ckpt, ckpt
from tests.unit.runtime.rest.fake_gateway import FakeGateway

__all__ = ["ckpt"]
pytestmark = pytest.mark.row("530.8")

INTERVAL, TIMEOUT = "execution.checkpointing.interval", "execution.checkpointing.timeout"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def everything_may_change(ckpt: Ckpt, gateway: FakeGateway) -> None:
    gateway.allow_list = ("*",)


def given(gateway: FakeGateway) -> dict[str, str]:
    return gateway.jobs[JOB].own.given.to_dict()


def editor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Its code changes ``document``. What is left over lies in the test's directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = tmp_path / "editor.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "file = pathlib.Path(sys.argv[1])\n"
        f"document = json.loads(file.read_text())\n{code}\nfile.write_text(json.dumps(document))\n"
    )
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"{sys.executable} {script}")


def test_get(ckpt: Ckpt, capsys: Capture) -> None:
    assert ckpt("config", "set", JOB, f"{INTERVAL}=5 s", "my.number=1") == 0
    assert ckpt("config", "get", JOB) == 0
    shown = capsys.readouterr().out
    assert f"{INTERVAL} = 5 s\nmy.number = 1\n# version 2\n# version 2: {INTERVAL}, my.number; " in shown
    assert ckpt("config", "get", JOB, INTERVAL) == 0
    assert capsys.readouterr().out == "5 s\n"
    assert ckpt("config", "get", JOB, TIMEOUT) == 4
    assert ckpt("config", "get", JOB, "--json") == 0
    assert json.loads(capsys.readouterr().out)["version"] == 2


def test_set_and_unset(ckpt: Ckpt, gateway: FakeGateway, capsys: Capture) -> None:
    assert ckpt("config", "set", JOB, f"{INTERVAL}=5 s", "my.number=1", "--dry-run") == 0
    out = capsys.readouterr().out
    assert f"{INTERVAL}: (not set) -> 5 s\nmy.number: (not set) -> 1 (restart)\n" in out
    assert "It would be version 2, with a restart." in out
    assert given(gateway) == {}
    assert ckpt("config", "set", JOB, f"{INTERVAL}=5 s", "my.number=1", "--wait") == 0
    assert f"Job {JOB} has version 2, with which it runs." in capsys.readouterr().out
    assert ckpt("config", "unset", JOB, "my.number", "--json") == 0
    assert json.loads(capsys.readouterr().out)["changes"]["my.number"]["after"] is None
    assert given(gateway) == {INTERVAL: "5 s"}
    assert ckpt("config", "set", JOB, f"{INTERVAL}=5000 ms") == 0
    assert "Nothing has changed" in capsys.readouterr().out


def test_refused_changes_of_the_configuration_exit_with_their_codes(
    ckpt: Ckpt, gateway: FakeGateway, capsys: Capture
) -> None:
    assert ckpt("config", "set", JOB, "no separator") == 2
    assert ckpt("config", "set", JOB, f"{INTERVAL}=often") == 2
    assert INTERVAL in capsys.readouterr().err
    assert ckpt("config", "set", JOB, f"{INTERVAL}=5s", "--version", "2") == 5
    gateway.allow_list = ()
    assert ckpt("config", "set", JOB, f"{INTERVAL}=5s") == 6
    assert "allow-list" in capsys.readouterr().err
    assert ckpt("config", "get", "0" * 32) == 4


class TestEdit:
    def test_edited_text_is_stored_as_the_configuration_if_it_has_changed(
        self, ckpt: Ckpt, gateway: FakeGateway, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        assert ckpt("config", "set", JOB, f"{INTERVAL}=5 s", "my.password=hush") == 0
        editor(monkeypatch, tmp_path, f"document['{TIMEOUT}'] = '1 min'; del document['{INTERVAL}']")
        assert ckpt("config", "edit", JOB) == 0
        assert given(gateway) == {TIMEOUT: "1 min", "my.password": "hush"}
        assert f"{INTERVAL}: 5 s -> (not set)" in capsys.readouterr().err
        editor(monkeypatch, tmp_path, "pass")
        assert ckpt("config", "edit", JOB) == 0
        assert "Nothing has changed; " in capsys.readouterr().out

    def test_another_process_was_faster(
        self, ckpt: Ckpt, gateway: FakeGateway, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """While the editor was open."""
        editor(monkeypatch, tmp_path, f"document['{TIMEOUT}'] = '1 min'")
        note = ChangeNote(2, 1, "alice", (INTERVAL,))
        from ckpt_runtime.cli import job_config_commands

        original = job_config_commands._edit

        def slow(file: Path) -> None:
            original(file)
            gateway.jobs[JOB].changed = gateway.jobs[JOB].own.changed(Configuration({INTERVAL: "7 s"}), note)

        monkeypatch.setattr(job_config_commands, "_edit", slow)
        assert ckpt("config", "edit", JOB) == 5
        reported = capsys.readouterr().err
        assert f"changed while you edited version 1: version 2 by alice changed {INTERVAL}; " in reported
        (kept,) = tmp_path.glob("ckpt-config-*.json")
        assert str(kept) in reported
        assert json.loads(kept.read_text()) == {TIMEOUT: "1 min"}
        assert given(gateway) == {INTERVAL: "7 s"}

    @pytest.mark.parametrize("code", ["raise SystemExit(3)", "document = []", "document = {'a': 1}"])
    def test_an_editor_that_leaves_nothing_usable(
        self, ckpt: Ckpt, gateway: FakeGateway, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
        code: str,
    ) -> None:  # fmt: skip
        editor(monkeypatch, tmp_path, code)
        assert ckpt("config", "edit", JOB) in (1, 2)
        assert "has your text" in capsys.readouterr().err
        assert given(gateway) == {}
