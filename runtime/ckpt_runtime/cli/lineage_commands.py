"""``ckpt lineage``: upgrades in progress."""

from __future__ import annotations

from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.cli.job_commands import JobArgument


def release(cli: Cli, job: JobArgument) -> None:
    """End the upgrade of a job that is in progress, so that other clients can stop the job or start its successor.

    The upgrade itself ends when it finds that out. Use it when its task is gone for good.
    """
    client = cli.client()
    held = client.job_details(job).upgrade
    client.release_lineage(job)
    text = f"Job {job} was not being upgraded." if held is None else f"{held.owner} no longer upgrades job {job}."
    cli.output.result({"job_id": job, "released": None if held is None else held.owner}, text)
