"""The lineage that tasks report to OpenLineage: programs and snapshots that they have read, savepoints that they wrote
or deleted.

Datasets have the names of OpenLineage's naming convention. Its classes are imported only when its listener asks, which
is where ``apache-airflow-providers-openlineage`` is installed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from os.path import abspath
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from airflow.providers.common.compat.openlineage.facet import Dataset
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Asset

_SOURCE: Final = "ckpt"
_BUCKETS: Final = {"s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "gcs": "gs"}
"""Stores whose keys do not begin with a slash, with the names that OpenLineage uses for them."""


@dataclass(frozen=True, slots=True)
class Written:
    """A savepoint; ``size`` in bytes where it is known."""

    location: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class LineageReport:
    """The data that a task has read, written and deleted, and its job. Reads that are None are left out."""

    reads: Collection[str | None] = ()
    writes: Collection[Written] = ()
    deletes: Collection[str] = ()
    job_id: str | None = None


class ReportsLineage:
    """Base of operators that read or write programs and snapshots, in addition to Airflow's own."""

    lineage_report = LineageReport()
    """Set by the operator for OpenLineage's listener, which asks at the end of the task."""

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage[Any, Any]:
        """Called by OpenLineage's listener, in the process that ran the task to its end, also to a failure."""
        from airflow.providers.common.compat.openlineage.facet import (
            ExternalQueryRunFacet,
            LifecycleStateChange,
            LifecycleStateChangeDatasetFacet,
            OutputDataset,
            OutputStatisticsOutputDatasetFacet,
        )
        from airflow.providers.openlineage.extractors import OperatorLineage

        report = self.lineage_report
        outputs = []
        for one in report.writes:
            size = {} if one.size is None else {"outputStatistics": OutputStatisticsOutputDatasetFacet(size=one.size)}
            outputs.append(OutputDataset(*dataset_name(one.location), outputFacets={**size}))
        dropped = LifecycleStateChangeDatasetFacet(lifecycleStateChange=LifecycleStateChange.DROP)
        outputs += [
            OutputDataset(*dataset_name(path), facets={"lifecycleStateChange": dropped}) for path in report.deletes
        ]
        job = {}
        if report.job_id is not None:
            job["externalQuery"] = ExternalQueryRunFacet(externalQueryId=report.job_id, source=_SOURCE)
        return OperatorLineage(
            inputs=[_dataset(path) for path in report.reads if path], outputs=outputs, run_facets=job
        )


def dataset_name(location: str) -> tuple[str, str]:
    """OpenLineage's namespace and name of a path or URL."""
    parts = urlsplit(location)
    if not parts.scheme:
        return "file", abspath(location)
    path = unquote(parts.path).rstrip("/") or "/"
    if parts.scheme == "file":
        return f"file://{parts.netloc}" if parts.netloc else "file", path
    bucket = _BUCKETS.get(parts.scheme)
    if bucket is not None or parts.scheme == _SOURCE:
        return f"{bucket or _SOURCE}://{parts.netloc}", path.lstrip("/")
    return f"{parts.scheme}://{parts.netloc}", path


def program_location(ckpt_conn_id: str, pipeline: str | None, pipeline_id: str | None) -> str | None:
    """A program: the file or directory that it was uploaded from, else the one that the job manager keeps."""
    if pipeline:
        return pipeline
    return f"{_SOURCE}://{ckpt_conn_id}/pipelines/{pipeline_id}" if pipeline_id else None


def convert_asset_to_openlineage(asset: Asset, lineage_context: Any) -> Dataset:
    """The checkpoints or savepoints of a job, as one dataset; named in the provider's metadata."""
    del lineage_context  # a part of the converter's signature
    return _dataset(asset.uri)


def _dataset(location: str) -> Dataset:
    from airflow.providers.common.compat.openlineage.facet import Dataset

    namespace, name = dataset_name(location)
    return Dataset(namespace=namespace, name=name)
