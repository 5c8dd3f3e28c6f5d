"""The chart of Nexmark beside a peer: events per second and core of each query, as SVG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS, PEER = "#1f77b4", "#ff7f0e"


def bars(queries: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """Name, our figure and the peer's of each query that both have run, in thousands of events per second and core."""
    return [
        (name, found["events_per_s_core"] / 1000, found["peer_events_per_s_core"] / 1000)
        for name, found in queries.items()
        if "peer_events_per_s_core" in found
    ]


def write_chart(path: Path, queries: Mapping[str, Mapping[str, Any]], peer: str, note: str) -> None:
    """Writes a pair of bars for each query, with the ratio above it. ``note`` describes when and how they were
    measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = path.name  # the same figures give the same file
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    drawn = bars(queries)
    for at, (_, ours, theirs) in enumerate(drawn):
        axes.bar(at - 0.2, ours, 0.4, color=OURS, label="this engine" if at == 0 else None)
        axes.bar(at + 0.2, theirs, 0.4, color=PEER, label=peer if at == 0 else None)
        axes.annotate(f"{ours / theirs:.1f}×", (at, max(ours, theirs)), ha="center", va="bottom")
    axes.set_xticks(range(len(drawn)), [name for name, _, _ in drawn])
    axes.set_ylabel("1,000 events per second and core")
    axes.set_title(f"Nexmark, exactly once: {note}", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(y=0.12)
    axes.legend()
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
