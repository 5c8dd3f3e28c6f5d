"""All that a request could have changed in the dispatcher in memory, to compare before and after."""

from __future__ import annotations

from tests.unit.runtime.rest.fake_gateway import FakeGateway


def contents(gateway: FakeGateway) -> str:
    """All that a request could have changed."""
    jobs = {
        job_id: (job.status, job.overrides, job.request, job.next_checkpoint, job.timestamps)
        for job_id, job in gateway.jobs.items()
    }
    operations = sorted(gateway.operations)
    return repr((jobs, operations, sorted(gateway.pipelines), gateway.disposed, gateway.triggered, gateway.shut_down))
