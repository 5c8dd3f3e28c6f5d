"""Processes that a template forks: each has nothing of the others, and none outlives its caller."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_runtime.processes import limited_process
from ckpt_runtime.processes.limited_process import (
    LimitedProcessError,
    ProcessLimits,
    ProcessTemplate,
    drop_templates,
    keep_templates,
    run_limited,
)
from tests.support.processes import children, living

LIMITS = ProcessLimits(time_s=60, memory_bytes=256 << 20, answer_bytes=10_000)
DEADLINE_S = 60
NEEDED = "NEEDED = ('json.tool',)\nOFTEN_NEEDED = ('wave',)\n"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module ``served`` runs the code that it is sent; ``answer`` is what it answers."""
    (tmp_path / "served.py").write_text(
        "import os, sys, time\n"
        "from ckpt_runtime.processes.limited_process import serve\n"
        f"{NEEDED}"
        "def run(request):\n"
        "    names = {'answer': b'done'}\n"
        "    exec(request, names)\n"
        "    return str(names['answer']).encode()\n"
        "def main():\n"
        "    serve(run)\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    keep_templates()
    yield
    drop_templates()
    assert not limited_process._TEMPLATES._living


def run(code: str) -> str:
    return run_limited("served", f"import os, sys, time\n{code}".encode(), LIMITS).decode()


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while living(pids):
        assert time.monotonic() < deadline


@pytest.mark.usefixtures("served")
def test_processes_come_from_one_template_which_imports_more_for_the_second() -> None:
    imported = "answer = (os.getppid(), 'json.tool' in sys.modules, 'wave' in sys.modules)"
    first, second = run(imported), run(imported)
    assert first.replace("False", "True") == second
    assert "True, False" in first
    template = int(second.strip("(").split(",")[0])
    assert template in children(os.getpid())


@pytest.mark.usefixtures("served")
def test_process_inherits_no_descriptors_of_the_template_or_other_processes(tmp_path: Path) -> None:
    """It has the null device twice, its standard error and its answer; the question is closed when it has been read."""
    opened = (
        "links = {}\n"
        "for number in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        links[int(number)] = os.readlink('/proc/self/fd/' + number).split(':')[0].split('/')[1:2]\n"
        "    except FileNotFoundError:\n"
        "        continue\n"
        "answer = sorted(links)[:3], len(links), os.getpid() == os.getsid(0), os.getpgid(0) == os.getpid()"
    )
    alone = run(opened)
    assert alone == "([0, 1, 2], 4, True, True)"
    here, go = tmp_path / "here", tmp_path / "go"
    waits = f"open({str(here)!r}, 'w').close()\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run, waits)
        while not here.exists():
            assert not other.done()
        assert run(opened) == alone
        go.touch()
        assert other.result(DEADLINE_S)


@pytest.mark.usefixtures("served")
def test_each_process_has_an_environment_of_its_own_and_the_template_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "template = open(f'/proc/{os.getppid()}/environ', 'rb').read()\n"
        "answer = f\"{os.getppid()} {os.environ.get('MY_SECRET')} {b'MY_SECRET' in template}\""
    )
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SECRET", "MY_SECRET")
    monkeypatch.setenv("USER_TOKEN", "MY_SECRET")
    monkeypatch.setenv("MY_SECRET", "first")
    parent, *first = run(code).split()
    monkeypatch.setenv("MY_SECRET", "second")
    assert first == ["first", "False"]
    assert run(code).split() == [parent, "second", "False"]
    monkeypatch.delenv("MY_SECRET")
    assert run(code).split() == [parent, "None", "False"]


def holds(pid: int, text: str) -> bool:
    """Whether a process has it anywhere in its memory."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            area, mode = line.split()[:2]
            if mode.startswith("rw"):
                first, last = (int(end, 16) for end in area.split("-"))
                memory.seek(first)
                if text.encode() in memory.read(last - first):
                    return True
    return False


@pytest.mark.usefixtures("served")
def test_environment_of_a_process_is_not_in_memory_that_later_ones_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = secrets.token_hex()
    monkeypatch.setenv("MY_SECRET", secret)
    template = int(run("assert os.environ['MY_SECRET']; answer = os.getppid()"))
    assert holds(os.getpid(), secret)
    assert not holds(template, secret)


@pytest.mark.usefixtures("served")
def test_a_template_that_has_ended_is_replaced() -> None:
    before = int(run("answer = os.getppid()"))
    os.kill(before, signal.SIGKILL)
    assert int(run("answer = os.getppid()")) != before


@pytest.mark.usefixtures("served")
def test_a_process_whose_template_ends_gives_no_result_and_ends_too(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(LimitedProcessError, match="by signal 9"):
        run(f"open({str(pid)!r}, 'w').write(str(os.getpid()))\nos.kill(os.getppid(), 9)\ntime.sleep(1000)")
    until_gone([int(pid.read_text())])


@pytest.mark.usefixtures("served")
def test_a_template_that_cannot_import_a_module_starts_nothing_and_keeps_running() -> None:
    before = run("answer = os.getppid()")
    with pytest.raises(LimitedProcessError, match="code 1") as ended:
        run_limited("nowhere", b"", LIMITS)
    assert "No module named nowhere" in ended.value.last_words
    assert run("answer = os.getppid()") == before


def test_processes_end_with_the_process_that_requested_them(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text("import time\ndef main():\n    time.sleep(1000)\n")
    template = ProcessTemplate({**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), "runtime"))})
    with tempfile.TemporaryFile() as file:
        process = template.fork("waiting", [], file.fileno(), file.fileno(), {})
        assert process is not None
        started = children(template.process.pid)
        assert len(started) == 1
        template.close()
        until_gone(started)
        assert process.end() == -signal.SIGKILL
        with pytest.raises(ConnectionError):
            template.fork("waiting", [], file.fileno(), file.fileno(), {})
