"""Sampled stacks as the tree of Flink's ``VertexFlameGraph``. Pure functions."""

from __future__ import annotations

from typing import Any

from ckpt_runtime.jobmaster.flame_graphs import StackSamples

Json = dict[str, Any]

_NOTHING_RUNS = -1
"""The value that Flink sends in place of a time for a vertex that has ended."""
KINDS = ("full", "on_cpu", "off_cpu")


def flame_graph(samples: StackSamples, kind: str, subtask: int | None) -> Json:
    """Counts how often each function was sampled, as a child of its caller; for all subtasks, or for one."""
    if samples.ended_at_ms is None:
        return {"endTimestamp": _NOTHING_RUNS, "data": None}
    root = _node("root")
    for stack in samples.stacks:
        count = {"full": stack.on_cpu + stack.off_cpu, "on_cpu": stack.on_cpu, "off_cpu": stack.off_cpu}[kind]
        if count and subtask in (None, stack.subtask):
            node = root
            node["value"] += count
            for frame in stack.frames:
                node = node["children"].setdefault(frame, _node(frame))
                node["value"] += count
    return {"endTimestamp": samples.ended_at_ms, "data": _listed(root)}


def _node(name: str) -> Json:
    return {"name": name, "value": 0, "children": {}}


def _listed(node: Json) -> Json:
    children = sorted(node["children"].values(), key=lambda child: -child["value"])
    return {"name": node["name"], "value": node["value"], "children": [_listed(child) for child in children]}
