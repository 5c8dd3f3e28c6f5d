"""The line of a stack trace that says what went wrong."""

from __future__ import annotations

from ckpt_runtime.contract.stack_traces import root_message, telling_line

__all__ = ["root_message", "telling_line"]
