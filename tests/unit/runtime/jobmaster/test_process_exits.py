"""What exit codes tell."""

from __future__ import annotations

import pytest

from ckpt_runtime.jobmaster.slots import describe_exit, hint_of


@pytest.mark.parametrize(
    ("code", "reported"),
    [
        (None, "its process ended"),
        (3, "its process ended with exit code 3"),
        (
            -9,
            "its process ended with exit code -9 (SIGKILL: killed by another process, most often by the kernel because",
        ),
        (137, "its process ended with exit code 137 (SIGKILL: killed"),
        (-11, "its process ended with exit code -11 (SIGSEGV: a crash in native code)"),
        (-15, "its process ended with exit code -15 (SIGTERM)"),
        (255, "its process ended with exit code 255"),
    ],
)
def test_a_signal_is_named_with_what_it_usually_means(code: int | None, reported: str) -> None:
    assert describe_exit(code).startswith(reported)


@pytest.mark.parametrize("code", [0, 1, 127, 128, 1_000])
def test_other_codes_have_no_hint(code: int) -> None:
    assert hint_of(code) == ""
