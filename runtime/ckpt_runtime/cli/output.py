"""The output of commands: JSON for scripts, tables and a progress line on a terminal, plain lines otherwise.

Results go to standard output, everything else to standard error. Rich is loaded only for a terminal.
"""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from ckpt_runtime.contract.spelling import plain

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class CommandOutput:
    """``as_json`` prints one JSON document per command; ``decorated`` allows rich output."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.decorated = not as_json and sys.stdout.isatty()

    def result(self, document: Any, *lines: str) -> None:
        """Print the command's result: ``document`` for scripts, else the lines."""
        if self.as_json:
            print(json.dumps(plain(document), indent=2))
            return
        for line in lines:
            print(line)

    def line(self, document: Any, text: str) -> None:
        """Print one of many results that arrive over time, as a line of JSON or as text, and flush it."""
        print(json.dumps(plain(document)) if self.as_json else text, flush=True)

    def note(self, text: str) -> None:
        """Print a message that is not part of the result."""
        print(text, file=sys.stderr)

    def error(self, text: str, code: int) -> None:
        """Print why the command failed."""
        if self.as_json:
            print(json.dumps({"error": text, "exit_code": code}), file=sys.stderr)
        else:
            print(f"ckpt: {text}", file=sys.stderr)

    def table(self, document: Any, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
        """Print rows under headings, or ``empty`` if there are no rows."""
        if self.as_json:
            self.result(document)
        elif not rows:
            print(empty)
        elif self.decorated:
            _rich_table(columns, rows)
        else:
            text = [list(columns), *([str(cell) for cell in row] for row in rows)]
            widths = [max(len(line[number]) for line in text) for number in range(len(columns))]
            for line in text:
                print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())

    @contextmanager
    def progress(self) -> Iterator[Callable[[str], None]]:
        """Show a text in a line that changes in place on a terminal; elsewhere each change is a line of its own."""
        if self.decorated:
            from rich.console import Console
            from rich.markup import escape

            with Console(stderr=True).status("") as status:
                yield lambda text: status.update(escape(text))
            return
        shown = ""

        def show(text: str) -> None:
            nonlocal shown
            if text != shown and not self.as_json:
                self.note(text)
            shown = text

        yield show


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column == "JOB ID")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console().print(table)


def time_text(time_ms: int | None) -> str:
    """Local time of a timestamp; a dash if there is none."""
    if time_ms is None or time_ms <= 0:
        return "-"
    return datetime.fromtimestamp(time_ms / 1000).strftime("%Y-%m-%d %H:%M:%S")


def duration_text(duration_ms: int | None) -> str:
    """A duration as readable text: ``250 ms``, ``1.5 s``, ``2 min 5 s``, ``3 h 20 min``."""
    if duration_ms is None or duration_ms < 0:
        return "-"
    if duration_ms < 1000:
        return f"{duration_ms} ms"
    seconds = duration_ms / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size_text(size: int | None) -> str:
    """A size as readable text: ``512 B``, ``1.5 MiB``."""
    if size is None or size < 0:
        return "-"
    amount, unit = float(size), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}"


def user_name() -> str | None:
    """The name of the user who runs the command, for records of requests."""
    try:
        return getpass.getuser()
    except (KeyError, ImportError, OSError):  # a user id without a name
        return None
