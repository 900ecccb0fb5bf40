"""A picture of a training: the time of each stage and the loss of each level."""

from __future__ import annotations

import os
from typing import Any

from ..serialization import atomic_write
from ..training.record import TrainingRecord

# Stages shorter than this part of all are put together with what is no stage.
_SMALLEST = 0.01


def plot_training(record: TrainingRecord, path: str | os.PathLike) -> None:
    """
    Writes a PNG picture of a training: seconds by stage and, where an encoder was fine-tuned, the loss by level.

    Args:
        record ([`TrainingRecord`]):
            The training.
        path (`str` or `os.PathLike`):
            File to write.
    """
    if not record.stages:
        raise ValueError("There is no training to show: the record has no stages.")
    try:
        # Not pyplot: it would choose a backend and keep the figure for the whole process.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`plot_training` needs matplotlib, which is not installed: pip install matplotlib."
        ) from error

    has_levels = bool(record.levels)
    figure = Figure(figsize=(10 if has_levels else 7, 4), layout="constrained")
    panels = figure.subplots(1, 2 if has_levels else 1, squeeze=False)[0]
    _show_stages(panels[0], record)
    if has_levels:
        _show_levels(panels[1], record)
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})


def _show_stages(axes: Any, record: TrainingRecord) -> None:
    total = max(record.seconds or 0.0, sum(record.stages.values()))
    shown = {name: seconds for name, seconds in record.stages.items() if seconds >= _SMALLEST * total}
    rest = total - sum(shown.values())
    if rest >= _SMALLEST * total:
        shown["all else"] = rest
    names = sorted(shown, key=lambda name: shown[name])
    bars = axes.barh(names, [shown[name] for name in names])
    axes.bar_label(bars, fmt=lambda seconds: f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.2g} s", padding=3)
    axes.margins(x=0.2)
    axes.set_xlabel("seconds")
    axes.set_title("Time by stage")


def _show_levels(axes: Any, record: TrainingRecord) -> None:
    for level in sorted({entry["level"] for entry in record.levels}):
        entries = [entry for entry in record.levels if entry["level"] == level]
        axes.plot(
            [entry["step"] for entry in entries],
            [entry["loss"] for entry in entries],
            marker="o",
            markersize=3,
            label=f"level {level:.0f}",
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title("Loss by level of the tree")
