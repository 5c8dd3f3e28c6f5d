"""The configuration of a running job changed, through REST and the command: its output is exact, its slots stay."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckpt_runtime.cli.main import app
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import BadRequest, CkptApiError, Conflict
from ckpt_runtime.contract.configuration import CheckpointConfigPatch, JobConfig
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast, program_of
from tests.support.outputs import visible
from tests.support.patience import patient

INTERVAL, TIMEOUT = "execution.checkpointing.interval", "execution.checkpointing.timeout"
MARK = "sequence.mark"


def restarts(client: CkptClient, job: SequenceJob) -> str:
    return client.job_metrics(job.job_id, ("numRestarts",))["numRestarts"]


def runs(client: CkptClient, cluster: MiniCluster, job: SequenceJob, version: int) -> JobConfig:
    """Waits until the tasks run with it."""
    cluster.wait_until(lambda: client.job_config(job.job_id).running_version == version, f"version {version}")
    job.running()
    return client.job_config(job.job_id)


def slots(cluster: MiniCluster) -> list[str]:
    async def held() -> list[str]:
        return sorted(slot.slot_id for slot in cluster.cluster.slots.all() if slot.owner is not None)

    return cluster.call(held())


@pytest.mark.row("530.5")
@pytest.mark.row("530.7")
@pytest.mark.row("530.11")
def test_a_restart_in_place_with_what_tasks_and_pipeline_code_see(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob
) -> None:
    """Twice, of a job that may not restart once for a failure."""
    strategy = {"restart-strategy.type": "none"}
    job.start(configuration=fast() | strategy)
    job.has_output()
    held = slots(cluster)
    found = client.job_config(job.job_id)
    assert (found.version, found.running_version) == (1, 1)
    for number, (key, text) in enumerate(((MARK, "blue"), (MARK, "green"))):
        given = dict(client.job_config(job.job_id).configuration) | {key: text}
        if number == 0:
            answer = client.replace_job_config(job.job_id, given, 1)
            assert (answer.version, answer.restart, answer.changes[key].change) == (2, True, "restart")
        else:
            command = ["--url", cluster.rest_url, "config", "set", job.job_id, f"{key}={text}", "--wait"]
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 0, done.output
        cluster.wait_until((job.faults / f"mark-{text}").exists, "user code to be configured so")
        found = runs(client, cluster, job, number + 2)
        assert (found.configuration[key], found.version) == (text, number + 2)
        known = len(visible(job.out / "order"))
        cluster.wait_until(lambda known=known: len(visible(job.out / "order")) > known, "more output")  # type: ignore[misc]
    assert slots(cluster) == held
    assert restarts(client, job) == "2"
    assert client.job_exceptions(job.job_id, 5).entries == ()
    assert [change.options for change in found.changes] == [(MARK,), (MARK,)]
    assert client.checkpoint_statistics(job.job_id).latest_restored is not None
    job.stopped()


@pytest.mark.row("530.8")
@pytest.mark.row("530.9")
def test_change_of_a_live_option_does_not_restart_the_job(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob
) -> None:
    job.start()
    job.running()
    job_id = job.job_id
    client.patch_checkpoint_config(job_id, CheckpointConfigPatch(timeout_ms=77_000))
    options = {INTERVAL: "300 ms", TIMEOUT: "70 s", "restart-strategy.type": "none"}
    answer = client.patch_job_config(job_id, options)
    assert (answer.restart, answer.version) == (False, 2)
    assert answer.changes[TIMEOUT].hidden_by_override == "checkpointTimeout"
    effective = client.checkpoint_config(job_id)
    assert (effective.interval_ms, effective.timeout_ms) == (300, 77_000)
    assert client.reset_checkpoint_config(job_id).timeout_ms == 70_000
    found = client.job_config(job_id)
    assert found.execution_config["restart-strategy"] == "none"
    assert (found.version, found.running_version) == (2, 2)
    assert client.patch_job_config(job_id, {TIMEOUT: None}, 2).version == 3
    assert client.checkpoint_config(job_id).timeout_ms == 600_000
    assert TIMEOUT not in client.job_config(job_id).configuration
    assert restarts(client, job) == "0"
    job.stopped()


@pytest.mark.row("530.5")
@pytest.mark.row("530.8")
def test_interval_can_be_removed_and_set_again(client: CkptClient, cluster: MiniCluster, job: SequenceJob) -> None:
    """By PUT, of a job without a configured restart strategy: it keeps the default, and nothing restarts."""
    job.start(configuration={INTERVAL: "200 ms"})
    job.running()
    job_id = job.job_id
    cluster.wait_for_checkpoints(job_id, 2)
    given = client.job_config(job_id)
    assert given.version == 1
    assert given.execution_config["restart-strategy"] == "exponential-delay"
    without = {key: text for key, text in given.configuration.items() if key != INTERVAL}
    answer = client.replace_job_config(job_id, without, 1)
    assert (answer.version, answer.restart, answer.changes[INTERVAL].after) == (2, False, None)
    found = client.job_config(job_id)
    assert (found.configuration, found.execution_config["restart-strategy"]) == (without, "exponential-delay")
    assert client.checkpoint_config(job_id).interval_ms is None
    cluster.wait_until(lambda: client.checkpoint_statistics(job_id).counts.in_progress == 0, "the last of them to end")
    known = client.checkpoint_statistics(job_id).counts.total
    job.inject("map-raise")  # a failure is restarted all the same, and gives a periodic checkpoint time to come
    job.restarted(1)
    assert client.checkpoint_statistics(job_id).counts.total == known
    assert client.replace_job_config(job_id, dict(given.configuration), 2).version == 3
    assert client.checkpoint_config(job_id).interval_ms == 200
    cluster.wait_for_checkpoints(job_id, 2)
    assert client.job_config(job_id).execution_config["restart-strategy"] == "exponential-delay"
    assert restarts(client, job) == "1"
    job.stopped()


@pytest.mark.row("530.10")
def test_a_dry_run_and_a_request_that_is_sent_again(client: CkptClient, cluster: MiniCluster, job: SequenceJob) -> None:
    """A dry run changes nothing, and is refused as the change would be. Of equal requests at once one changes it."""
    job.start()
    job.running()
    job_id = job.job_id
    options = {MARK: "blue", "my.password": "hush"}
    dry = client.patch_job_config(job_id, options, dry_run=True)
    assert (dry.version, dry.restart, sorted(dry.changes)) == (2, True, ["my.password", MARK])
    with pytest.raises(BadRequest, match="pipeline.name"):
        client.patch_job_config(job_id, {"pipeline.name": "other"}, dry_run=True)
    with pytest.raises(Conflict, match="has version 1"):
        client.patch_job_config(job_id, options, 7, dry_run=True)
    found = client.job_config(job_id)
    assert (found.version, found.running_version, found.changes) == (1, 1, ())
    assert options.keys().isdisjoint(found.configuration)
    wanted = {**found.configuration, **options}
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: client.replace_job_config(job_id, wanted, 1), range(4)))
    assert {answer.version for answer in answers} == {2}
    found = runs(client, cluster, job, 2)
    assert found.configuration["my.password"] == "******"
    # What is shown is sent back, with one change: the password stays what it was.
    assert client.replace_job_config(job_id, {**found.configuration, MARK: "green"}, 2).changes.keys() == {MARK}
    found = runs(client, cluster, job, 3)
    given = cluster.call(_given(cluster, job_id))
    assert (given["my.password"], given[MARK]) == ("hush", "green")
    assert [(change.version, change.options) for change in found.changes] == [(2, ("my.password", MARK)), (3, (MARK,))]
    assert restarts(client, job) == "2"
    job.stopped()


async def _given(cluster: MiniCluster, job_id: str) -> dict[str, str]:
    """What the job was given, unmasked."""
    return cluster.dispatcher.jobs[job_id].accepted_plan.own.given.to_dict()


@pytest.mark.row("530.3")
def test_only_options_on_the_allow_list_may_change(tmp_path: Path) -> None:
    """An option is meant by its older name too. What is refused changes nothing, also what would be allowed of it."""
    retained = "execution.checkpointing.num-retained"
    allowed = f"{INTERVAL}, state.checkpoints.num-retained"
    configuration = {"jobmanager.execution.dynamic-configuration.allow-list": allowed}
    with MiniCluster(configuration=configuration, rest=True) as own, CkptClient(own.rest_url) as client:
        job = SequenceJob(own, tmp_path)
        job.start()
        job.running()
        with pytest.raises(CkptApiError, match=f"{TIMEOUT}, {MARK}: cannot be changed") as refused:
            client.patch_job_config(job.job_id, {INTERVAL: "300 ms", MARK: "blue", TIMEOUT: "1 min"})
        assert refused.value.status == 403
        with pytest.raises(BadRequest, match="pipeline.name"):
            client.patch_job_config(job.job_id, {"pipeline.name": "other", TIMEOUT: "1 min"})
        assert client.job_config(job.job_id).version == 1
        assert client.patch_job_config(job.job_id, {INTERVAL: "300 ms", retained: "2"}).version == 2
        job.canceled()


@pytest.mark.long
@pytest.mark.row("530.11")
def test_the_parallelism_is_a_live_rescale(client: CkptClient, cluster: MiniCluster, job: SequenceJob) -> None:
    job.start(parallelism=1)
    job.has_output()
    assert client.patch_job_config(job.job_id, {"parallelism.default": "3", MARK: "wide"}).restart
    found = runs(client, cluster, job, 2)
    assert {vertex.parallelism for vertex in client.job_details(job.job_id).vertices} == {3}
    assert found.execution_config["job-parallelism"] == 3
    cluster.wait_until((job.faults / "mark-wide").exists, "user code to be configured so")
    with pytest.raises(BadRequest, match="200 of operator .numbers. is above its maximum parallelism 128"):
        client.patch_job_config(job.job_id, {"parallelism.default": "200"})
    client.patch_job_config(job.job_id, {MARK: "still wide"})
    runs(client, cluster, job, 3)
    assert {vertex.parallelism for vertex in client.job_details(job.job_id).vertices} == {3}
    job.stopped()


@pytest.mark.row("530.11")
def test_an_option_that_the_pipeline_sets(client: CkptClient, cluster: MiniCluster) -> None:
    """Without a value of its own, the job has the pipeline's; another plan is refused, and nothing has changed."""
    arguments = [f"{TIMEOUT}=60 s", "my.number=1"]
    job_id = cluster.submit(
        program_of("configured"), entry="configured", arguments=arguments, configuration={TIMEOUT: "50 s"}
    )
    client.wait_for_state(job_id, {"RUNNING"}, timeout_s=patient(180))
    assert client.checkpoint_config(job_id).timeout_ms == 50_000
    assert client.patch_job_config(job_id, {TIMEOUT: None}).version == 2
    assert client.checkpoint_config(job_id).timeout_ms == 60_000
    assert client.job_config(job_id).configuration[TIMEOUT] == "60 s"
    assert client.patch_job_config(job_id, {TIMEOUT: None, "my.number": None}).version == 2
    client.cancel_job(job_id)
    client.wait_for_state(job_id, {"CANCELED"}, timeout_s=patient(180))


@pytest.mark.row("530.11")
def test_a_pipeline_that_makes_another_plan_of_it_is_refused(
    client: CkptClient, cluster: MiniCluster, tmp_path: Path
) -> None:
    (tmp_path / "changing.py").write_text(
        "def pipeline(spark):\n"
        "    rows = spark.readStream.format('numbers').option('rowsPerSecond', 100).load().hint('uid', 'numbers')\n"
        "    if spark.conf.get('my.filter', '') == 'yes':\n"
        "        rows = rows.select('value').hint('uid', 'select')\n"
        "    if spark.conf.get('my.filter', '') == 'broken':\n"
        "        raise ValueError('not with me')\n"
        "    rows.writeStream.format('noop').queryName('rows').start()\n"
    )
    job_id = cluster.submit(tmp_path, entry="changing")
    client.wait_for_state(job_id, {"RUNNING"}, timeout_s=patient(180))
    with pytest.raises(BadRequest, match="builds another plan"):
        client.patch_job_config(job_id, {"my.filter": "yes"})
    with pytest.raises(BadRequest, match="not with me"):
        client.patch_job_config(job_id, {"my.filter": "broken"})
    assert client.job_config(job_id).version == 1
    client.cancel_job(job_id)
    client.wait_for_state(job_id, {"CANCELED"}, timeout_s=patient(180))
    with pytest.raises(Conflict, match="CANCELED"):
        client.patch_job_config(job_id, {"my.filter": "no"})
    assert client.job_config(job_id).version == 1
