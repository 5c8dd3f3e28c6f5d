"""A whole job that decodes Avro messages with a Schema Registry and encodes others, read by fastavro."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.outputs import visible
from tests.support.pipelines.avro_orders import KEY, ORDER
from tests.unit.runtime.frontend.test_avro_functions import FIRST, encoded, framed, registry

fastavro = pytest.importorskip("fastavro")


@pytest.mark.row("ends.4")
@pytest.mark.row("ends.5")
def test_messages_of_two_schemas_are_decoded_and_encoded_in_a_job(cluster: MiniCluster, tmp_path: Path) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    newer = json.loads(ORDER)
    messages = [framed(7, encoded(FIRST, {"id": number})) for number in range(3)]
    messages += [framed(8, encoded(newer, {"id": 10, "country": "DE", "at": at})), b"\x00\x00", None]
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    pq.write_table(pa.table({"value": pa.array(messages, pa.binary())}), source / "messages.parquet")
    with registry({7: {"schema": json.dumps(FIRST)}, 8: {"schema": ORDER}}) as serving:
        job = cluster.submit(
            PIPELINES / "avro_orders.py",
            arguments=[str(source), serving.url, str(output)],
            configuration={**fast(), "execution.checkpointing.dir": str(tmp_path / "checkpoints")},
        )
        cluster.wait_for_status(job, JobStatus.FINISHED)
    found = visible(output).sort_values("id", na_position="last")
    assert found["id"].tolist()[:3] == [1, 2, 10]
    assert found["country"].tolist()[:3] == ["?", "?", "DE"]
    assert found["country"].isna().tolist() == [False] * 3 + [True] * 2
    assert pd.to_datetime(found["at"], utc=True).tolist()[2] == pd.Timestamp(at)
    keys = [fastavro.schemaless_reader(io.BytesIO(key), json.loads(KEY)) for key in found["key"].tolist()]
    assert keys[:3] == [{"country": "?", "id": 1}, {"country": "?", "id": 2}, {"country": "DE", "id": 10}]
    assert keys[3:] == [{"country": None, "id": None}] * 2
    assert [message[5:] for message in found["framed"]] == found["key"].tolist()
    assert {message[:5] for message in found["framed"]} == {framed(100, b"")}
    assert serving.subjects == {"keys": [{"schema": KEY}]}
    asked = ["/schemas/ids/7", "/schemas/ids/8", "/subjects/keys/versions"]
    assert sorted({path for path, _ in serving.asked}) == asked
