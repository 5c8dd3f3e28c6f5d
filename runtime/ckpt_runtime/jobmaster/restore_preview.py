"""How a snapshot would fit a plan: the reasons for a refusal, and what would happen to each operator's state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.gateway_errors import SubmissionFailed
from ckpt_runtime.jobmaster.gateway_values import RunRequest
from ckpt_runtime.jobmaster.request_checks import check_backend, check_fits, check_release
from ckpt_runtime.snapshots.preflight import StateVerdict


@dataclass(frozen=True, slots=True)
class OperatorPreview:
    """``verdict``: matched, new or dropped. Numbers are None for the side that does not have the operator."""

    uid: str
    name: str
    verdict: str
    restored_parallelism: int | None = None
    parallelism: int | None = None
    restored_max_parallelism: int | None = None
    max_parallelism: int | None = None


@dataclass(frozen=True, slots=True)
class RestorePreview:
    """``refusals`` are the reasons for which a submission would fail; empty when the snapshot fits."""

    snapshot: CompletedCheckpoint
    operators: tuple[OperatorPreview, ...]
    states: tuple[StateVerdict, ...]
    refusals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlanPreview:
    """The graph that a submission would run, and its ``warnings``; ``restore`` when it starts from a snapshot."""

    graph: JobGraph
    restore: RestorePreview | None = None
    warnings: tuple[str, ...] = ()


def preview(
    snapshot: CompletedCheckpoint,
    graph: JobGraph,
    configuration: Configuration,
    request: RunRequest,
    states: Iterable[StateVerdict],
) -> RestorePreview:
    """Runs all checks of a submission and collects their refusals."""
    judged = tuple(states)
    refused = [f"state {each.state!r} of operator {each.operator!r}: {each.reason}" for each in judged if each.reason]
    checks = (
        partial(check_backend, snapshot, configuration, request),
        partial(check_release, snapshot, request),
        partial(check_fits, snapshot, graph, request),
    )
    for check in checks:
        try:
            check()
        except SubmissionFailed as error:
            refused.append(str(error))
    return RestorePreview(snapshot, tuple(_operators(snapshot, graph)), judged, tuple(refused))


def _operators(snapshot: CompletedCheckpoint, graph: JobGraph) -> Iterable[OperatorPreview]:
    """Yields operators with state: those of the plan in its order, then those that the plan lacks."""
    kept = {uid for state in snapshot.states.values() for uid, own in state.operators.items() if own.keyed or own.lists}
    stored = {uid: vertex for vertex in snapshot.vertices for uid in vertex.operator_uids}
    planned = set()
    for vertex in graph.vertices:
        for node in vertex.operators:
            planned.add(node.uid)
            before = stored.get(node.uid)
            if before is not None and (node.stateful or node.uid in kept):
                yield OperatorPreview(
                    node.uid, node.name, "matched", before.parallelism, vertex.parallelism, before.max_parallelism,
                    vertex.max_parallelism,
                )  # fmt: skip
            elif node.stateful:
                numbers = {"parallelism": vertex.parallelism, "max_parallelism": vertex.max_parallelism}
                yield OperatorPreview(node.uid, node.name, "new", **numbers)
    for uid in sorted(kept - planned):
        before = stored[uid]
        numbers = {"restored_parallelism": before.parallelism, "restored_max_parallelism": before.max_parallelism}
        yield OperatorPreview(uid, before.name, "dropped", **numbers)
