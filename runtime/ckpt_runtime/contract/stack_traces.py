"""Finds the line of a stack trace that says what went wrong: Java's innermost cause, else the first line.

Flink sends whole traces, of eight kilobytes and more, as error messages, and nests causes in each other. A trace of
this project's engine begins with that line.
"""

from __future__ import annotations

_CAUSE = "Caused by: "
_ENVELOPE = ("<Exception on server side:", "End of exception on server side>")
_WRAPPERS = (
    "java.util.concurrent.CompletionException",
    "java.util.concurrent.ExecutionException",
    "org.apache.flink.runtime.rest.NotFoundException",
)
_MAX_CHARS = 1000


def root_cause_line(trace: str) -> str:
    """``Class: message`` of the root cause, the class without its package; empty for an empty trace."""
    lines = [line.strip() for line in trace.strip().splitlines()]
    lines = [line for line in lines if line and line not in _ENVELOPE]
    causes = [line.removeprefix(_CAUSE) for line in lines if line.startswith(_CAUSE)]
    line = causes[-1] if causes else "".join(lines[:1])
    name, separator, message = line.partition(": ")
    if separator and name in _WRAPPERS:
        return root_cause_line(message)
    short = f"{_without_package(name)}{separator}{message}"
    return short if len(short) <= _MAX_CHARS else f"{short[:_MAX_CHARS]}…"


def root_message(exception: str, trace: str) -> str:
    """Like :func:`root_cause_line`, without the class; ``exception`` if the trace is empty."""
    line = root_cause_line(trace) or exception
    name, separator, message = line.partition(": ")
    return message if separator and " " not in name else line


def _without_package(name: str) -> str:
    """Strip the package of a Java class name; other texts stay unchanged."""
    is_java = name.startswith(("java.", "javax.", "org.", "com.", "scala.", "akka.")) and " " not in name
    return name.rpartition(".")[2] if is_java else name
