"""Thread dumps: bounded, without values, of every thread."""

from __future__ import annotations

import sys
import threading

from ckpt_runtime.processes.thread_dump import MAX_FRAMES, dump_threads, frames_of

TIMEOUT_S = 60.0


def _deep(levels: int, inside: threading.Event, leave: threading.Event) -> None:
    if levels:
        _deep(levels - 1, inside, leave)
    else:
        inside.set()
        leave.wait(TIMEOUT_S)


def test_a_dump_has_the_frames_of_each_thread_innermost_first_and_no_source_line() -> None:
    inside, leave = threading.Event(), threading.Event()
    password = "hunter2"  # noqa: F841 -- a local variable that must not be shown
    thread = threading.Thread(target=_deep, args=(1, inside, leave), name="stuck\x1b[31m", daemon=True)
    thread.start()
    assert inside.wait(TIMEOUT_S)
    try:
        infos = dump_threads()
    finally:
        leave.set()
    [stuck] = [info for info in infos if info.name == "stuck\\x1b[31m"]
    lines = stuck.text.splitlines()
    assert lines[0].startswith('"stuck\\x1b[31m" daemon Id=')
    names = [line.partition("(")[0] for line in lines[1:] if line]
    assert names[0] == "\tat threading.Condition.wait"
    assert names.count(f"\tat {__name__}._deep") == 2
    assert names[-1] == "\tat threading.Thread._bootstrap"
    assert not any("hunter2" in info.text for info in infos)
    assert sorted(infos, key=lambda info: info.name) == list(infos)


def test_a_deep_stack_loses_its_middle() -> None:
    def nested(levels: int) -> list[str]:
        return nested(levels - 1) if levels else frames_of(sys._getframe())

    shown = nested(MAX_FRAMES + 50)
    assert len(shown) == MAX_FRAMES + 1
    assert "frames left out" in shown[MAX_FRAMES // 2]
