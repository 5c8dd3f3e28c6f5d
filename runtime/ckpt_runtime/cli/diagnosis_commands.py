"""``ckpt threads`` and ``ckpt logs``: the stacks and the last log lines of a session's processes on all machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from ckpt_runtime.cli.exit_codes import ExitCode
from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.client.errors import CkptApiError

_DRIVER = "driver"
ProcessArgument = Annotated[
    str | None, typer.Argument(help="`driver`, or the id of a slot agent, such as 0-1. Without one: all of them.")
]


def threads(cli: Cli, process: ProcessArgument = None) -> ExitCode:
    """Show what the threads of the driver and of the workers do, also where tasks are stuck."""
    client = cli.client()
    return _show(cli, process, lambda agent: "".join(info.text for info in client.thread_dump(agent)))


def logs(cli: Cli, process: ProcessArgument = None) -> ExitCode:
    """Show the last lines that the driver and the workers have logged."""
    return _show(cli, process, cli.client().recent_log)


def _show(cli: Cli, process: str | None, read: Callable[[str | None], str]) -> ExitCode:
    """Show each process; one that does not answer does not prevent the others from being shown."""
    chosen = [process] if process else [_DRIVER, *(agent.id for agent in cli.client().slot_agents())]
    shown: dict[str, str] = {}
    failed = False
    for name in chosen:
        try:
            shown[name] = read(None if name == _DRIVER else name)
        except CkptApiError as error:
            if process:
                raise
            cli.output.note(f"{name}: {error}")
            failed = True
    lines = [f"=== {name}\n{text}" if len(chosen) > 1 else text for name, text in shown.items()]
    cli.output.result(shown, *lines)
    return ExitCode.FAILED if failed else ExitCode.OK
