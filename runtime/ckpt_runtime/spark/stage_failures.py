"""The one line of a failed Spark job's message that tells what happened. Pure."""

from __future__ import annotations

import re

from ckpt_runtime.jobmaster.loss_notices import hint_of

_EXECUTOR = re.compile(r"ExecutorLostFailure \(executor (\S+) [^)]*\) Reason: (.+)")
_EXIT_CODE = re.compile(r"exited with code (\d+)")
_TASK = re.compile(r"finished unsuccessfully\.\n(.+)|Most recent failure: [^\n]*?\): (.+)")
_CALL = re.compile(r"An error occurred while calling [^\n]*\n:? ?")
_CLASS = re.compile(r"^(?:[\w$]+\.)+[\w$]+: ")
_MAX_CHARS = 500


def stage_failure(message: str) -> str:
    """A lost executor with its exit code; else why a task failed; else the first line that is not Py4J's."""
    executor = _EXECUTOR.search(message)
    if executor is not None:
        reason = executor[2].strip()
        code = _EXIT_CODE.search(reason)
        hint = hint_of(int(code[1])) if code is not None else ""
        return f"executor {executor[1]} was lost: {reason}{f' ({hint})' if hint else ''}"[:_MAX_CHARS]
    task = _TASK.search(message)
    text = (task[1] or task[2]) if task is not None else _CALL.sub("", message, count=1).partition("\n")[0]
    return _CLASS.sub("", text.strip())[:_MAX_CHARS] or "Spark gave no reason"
