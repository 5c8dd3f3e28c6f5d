"""What users type: durations."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from ckpt_runtime.cli import framework
from ckpt_runtime.cli.main import main


@pytest.mark.parametrize(
    ("text", "millis"),
    [("10 s", 10_000), ("10s", 10_000), ("1500ms", 1_500), ("5 min", 300_000), ("0", 0), (None, None)],
)
def test_durations_are_read_with_any_unit(text: str | None, millis: int | None) -> None:
    assert framework.duration_ms("--timeout", text) == millis
    assert framework.timeout_s("--timeout", text) == (None if millis is None else millis / 1000)


@pytest.mark.parametrize("text", ["300", " 300 ", "1"])
def test_a_number_without_a_unit_is_refused_with_the_ways_to_write_it(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f'--timeout: .* no unit, write "{text.strip()} s"'):
        framework.duration_ms("--timeout", text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["session", "start", "--ready-timeout", "300"],
        ["savepoint", "0" * 32, "--wait-timeout", "300"],
        ["stop", "0" * 32, "--wait-timeout", "300"],
        ["checkpoint", "0" * 32, "--wait-timeout", "300"],
        ["cancel", "0" * 32, "--wait", "--wait-timeout", "300"],
        ["patch-checkpoint-config", "0" * 32, "--interval", "30"],
        ["patch-checkpoint-config", "0" * 32, "--timeout", "30"],
        ["patch-checkpoint-config", "0" * 32, "--min-pause", "30"],
        ["patch-checkpoint-config", "0" * 32, "--aligned-timeout", "30"],
    ],
)
def test_every_duration_of_the_command_line_needs_its_unit(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--url", "http://127.0.0.1:1"]) == 2
    assert "has no unit" in " ".join(capsys.readouterr().err.split())


def test_options_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "options"
    file.write_text("# a secret\ns3.secret-key = a=b\n\n  my.key=1 \n")
    assert framework.pairs("-D", ["x=y", f"@{file}"]) == {"x": "y", "s3.secret-key": "a=b", "my.key": "1"}
    with pytest.raises(typer.BadParameter, match="my.key is given twice with different values"):
        framework.pairs("-D", ["my.key=2", f"@{file}"])
    with pytest.raises(typer.BadParameter, match="-D: '@/no/such/file' is not acceptable, the file cannot be read"):
        framework.pairs("-D", ["@/no/such/file"])
    file.write_text("no pair")
    with pytest.raises(typer.BadParameter, match="'no pair' is not acceptable, it must be key=value"):
        framework.pairs("-D", [f"@{file}"])
