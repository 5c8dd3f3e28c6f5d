"""Patterns of Hadoop for paths and names of files: ``*``, ``?``, ``[a-c]``, ``[^a]``, ``{a,b}``, and a backslash."""

from __future__ import annotations

import re
from itertools import pairwise

from ckpt_runtime.graph.errors import PlanError

_MARKS = "{}[]*?\\"


def is_pattern(path: str) -> bool:
    """Whether Spark takes a path for a pattern."""
    return any(mark in path for mark in _MARKS)


def name_pattern(key: str, glob: str) -> re.Pattern[str]:
    """What matches the names that a pattern without slashes means. ``key`` is the option. Raises PlanError."""
    parts: list[str] = []
    at, braces, in_set = 0, 0, False
    while at < len(glob):
        mark, at = glob[at], at + 1
        if mark == "\\":
            if at == len(glob):
                raise PlanError(f"option {key!r}", f"{glob!r} ends with a backslash")
            parts.append(re.escape(glob[at]))
            at += 1
        elif in_set:
            parts.append(mark if mark in "]-^" else re.escape(mark))
            in_set = mark != "]"
        elif mark == "[":
            negated = glob[at : at + 1] in ("!", "^") and at < len(glob)
            parts.append("[^" if negated else "[")
            at, in_set = at + negated, True
        elif mark in "*?":
            parts.append(".*" if mark == "*" else ".")
        elif mark == "{" or (mark in ",}" and braces):
            parts.append({"{": "(?:", ",": "|", "}": ")"}[mark])
            braces += {"{": 1, ",": 0, "}": -1}[mark]
        else:
            parts.append(re.escape(mark))
    if braces or in_set:
        raise PlanError(f"option {key!r}", f"{glob!r} has {'an open bracket' if in_set else 'an open brace'}")
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise PlanError(f"option {key!r}", f"{glob!r} is not a pattern: {error}") from None


def without_slashes_in_braces(path: str) -> list[str]:
    """The patterns that a path stands for whose braces hold slashes: ``/in/{a/b,c}`` is ``/in/a/b`` and ``/in/c``."""
    start, depth = -1, 0
    commas: list[int] = []
    for at, mark in enumerate(path):
        if mark == "{":
            if not depth:
                start, commas = at, []
            depth += 1
        elif mark == "," and depth == 1:
            commas.append(at)
        elif mark == "}" and depth:
            depth -= 1
            if not depth and "/" in path[start:at]:
                ends = [start, *commas, at]
                choices = [path[one + 1 : other] for one, other in pairwise(ends)]
                whole = [path[:start] + choice + path[at + 1 :] for choice in choices]
                return [each for one in whole for each in without_slashes_in_braces(one)]
    return [path]


def split_at_pattern(path: str) -> tuple[str, list[str]]:
    """The directory in front of a path's first pattern, and the segments from there on."""
    segments = path.split("/")
    first = next((at for at, segment in enumerate(segments) if is_pattern(segment)), len(segments))
    return "/".join(segments[:first]) or "/", [segment for segment in segments[first:] if segment]
