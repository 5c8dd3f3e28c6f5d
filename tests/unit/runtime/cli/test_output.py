"""Texts for people."""

from __future__ import annotations

import sys

import pytest

from ckpt_runtime.cli.framework import CommandError, ExitCode, code_of
from ckpt_runtime.cli.output import CommandOutput, duration_text, size_text, time_text
from ckpt_runtime.client.errors import CkptApiError, CkptClientError, Unreachable


@pytest.mark.parametrize(
    ("millis", "text"),
    [
        (None, "-"), (-1, "-"), (0, "0 ms"), (999, "999 ms"), (1500, "1.5 s"), (59_900, "59.9 s"),
        (125_000, "2 min 5 s"), (12_000_000, "3 h 20 min"),
    ],
)  # fmt: skip
def test_durations_are_shown_in_their_largest_units(millis: int | None, text: str) -> None:
    assert duration_text(millis) == text


@pytest.mark.parametrize(
    ("size", "text"), [(None, "-"), (-1, "-"), (0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**50, "1024.0 TiB")]
)
def test_sizes_are_shown_with_binary_units(size: int | None, text: str) -> None:
    assert size_text(size) == text


def test_times_are_shown_to_the_second_and_unknown_ones_as_a_dash() -> None:
    assert time_text(-1) == time_text(None) == "-"
    assert len(time_text(1_795_197_699_641)) == 19


def test_tables_on_a_terminal_are_rich_and_do_not_interpret_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output = CommandOutput(as_json=False)
    assert output.decorated
    output.table([], ("NAME",), [("[red]x[/red]",)], empty="")
    assert "[red]x[/red]" in capsys.readouterr().out
    with output.progress() as show:
        show("[bold]")


def test_progress_is_a_line_for_each_change_and_each_error_has_its_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with CommandOutput(as_json=False).progress() as show:
        for text in ("CREATED", "CREATED", "RUNNING"):
            show(text)
    assert capsys.readouterr().err == "CREATED\nRUNNING\n"
    assert code_of(CommandError("x", ExitCode.CONFLICT)) is ExitCode.CONFLICT
    assert code_of(Unreachable("u", "r")) is ExitCode.UNREACHABLE
    assert code_of(CkptApiError(500, [])) is ExitCode.SERVER_ERROR
    assert code_of(CkptClientError("x")) is ExitCode.USAGE
