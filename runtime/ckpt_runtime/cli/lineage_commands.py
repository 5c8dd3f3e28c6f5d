"""``ckpt lineage``: upgrades in progress."""

from __future__ import annotations

from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.cli.job_commands import JobArgument


def release(cli: Cli, job: JobArgument) -> None:
    """End whoever's upgrade of a job is in progress, so that others may end the job or start another one of it.

    The upgrade itself ends when it finds that out. Use it when its task is gone for good.
    """
    client = cli.client()
    held = client.job_details(job).upgrade
    client.release_lineage(job)
    text = (
        f"Job {job} was not being upgraded." if held is None else f"{held.owner} does not upgrade job {job} any more."
    )
    cli.output.result({"job_id": job, "released": None if held is None else held.owner}, text)
