"""``ckpt program``: uploaded programs and their holders."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.cli.output import time_text

ProgramArgument = Annotated[str, typer.Argument(metavar="PROGRAM", help="Id of an uploaded pipeline.")]
OwnerOption = Annotated[str, typer.Option("--owner", help="Who needs it: 1 to 200 letters, digits and ._:@+-")]


def list_programs(cli: Cli) -> None:
    """List uploaded programs, newest first."""
    found = cli.client().list_pipelines()
    document = [
        {
            "id": program.id,
            "name": program.name,
            "uploaded_at_ms": program.uploaded_at_ms,
            "holders": [{"owner": holder.owner, "since_ms": holder.since_ms} for holder in program.holders],
        }
        for program in found
    ]
    rows = [
        (program.id, time_text(program.uploaded_at_ms), ", ".join(holder.owner for holder in program.holders))
        for program in found
    ]
    cli.output.table(document, ("PROGRAM", "UPLOADED", "HELD BY"), rows, empty="No programs.")


def hold(cli: Cli, program: ProgramArgument, owner: OwnerOption) -> None:
    """Keep a program until it is released; with high availability the next driver has it, too."""
    held = cli.client().hold_pipeline(program, owner)
    owners = [holder.owner for holder in held.holders]
    cli.output.result({"id": held.id, "holders": owners}, f"Program {held.id} is held by {', '.join(owners)}.")


def release(cli: Cli, program: ProgramArgument, owner: OwnerOption) -> None:
    """Give up a hold."""
    cli.client().release_pipeline(program, owner)
    cli.output.result({"id": program, "released": owner}, f"{owner} no longer holds program {program}.")
