"""The chart of Nexmark beside its peers: events per second and core of each query, as SVG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS, PEERS = "#1f77b4", ("#ff7f0e", "#2ca02c")
_WIDTH = 0.8

Queries = Mapping[str, Mapping[str, Any]]


def bars(runs: Mapping[str, Queries]) -> list[tuple[str, list[float | None]]]:
    """Returns for each query of the first run our figure and that of each peer, in thousands of events per second and
    core. ``runs`` has the figures of a run by the peer that it was beside; None stands for what a peer has not run.
    """
    first = next(iter(runs.values()))
    drawn = []
    for name, found in first.items():
        peers = [run.get(name, {}).get("peer_events_per_s_core") for run in runs.values()]
        if any(peers):
            values = [found["events_per_s_core"], *peers]
            drawn.append((name, [None if value is None else value / 1000 for value in values]))
    return drawn


def write_chart(path: Path, runs: Mapping[str, Queries], note: str) -> None:
    """Writes our bar and those of the peers for each query, with the ratio above a peer's. ``note`` describes when and
    how they were measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = path.name  # the same figures give the same file
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    drawn = bars(runs)
    labels, width = ["this engine", *runs], _WIDTH / (1 + len(runs))
    for number, (label, color) in enumerate(zip(labels, (OURS, *PEERS), strict=False)):
        places = [at + (number - len(runs) / 2) * width for at in range(len(drawn))]
        axes.bar(places, [values[number] or 0 for _, values in drawn], width, color=color, label=label)
        for place, (_, values) in zip(places, drawn, strict=True):
            ours, theirs = values[0], values[number]
            if number and ours and theirs:
                axes.annotate(f"{ours / theirs:.1f}×", (place, theirs), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(drawn)), [name for name, _ in drawn])
    axes.set_ylabel("1,000 events per second and core")
    axes.set_title(f"Nexmark, exactly once: {note}", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.margins(y=0.12)
    axes.legend()
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
