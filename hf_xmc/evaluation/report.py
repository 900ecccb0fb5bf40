"""Tables and plots: results of [`XMCMetrics`], and the course of a training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..serialization import atomic_write

_BUCKET_METRICS = ("recall", "precision", "coverage", "contribution")


def format_metrics(metrics: Mapping[str, float], *, markdown: bool = False, digits: int = 2) -> str:
    """
    Formats metrics as a table in percent, with one row per metric and one column per k.

    Args:
        metrics (`Mapping[str, float]`): Result of [`XMCMetrics.compute`]: fractions by names such as `"P@5"`.
        markdown (`bool`, *optional*, defaults to `False`): Whether to write a Markdown table instead of aligned text.
        digits (`int`, *optional*, defaults to 2): Digits after the point.
    """
    cells: dict[str, dict[int, float]] = {}
    for key, value in metrics.items():
        name, at, k = key.rpartition("@")
        if not (at and name and k.isdigit()):
            raise ValueError(f"`{key}` is not a metric at k such as `P@5`. Pass the result of `XMCMetrics.compute()`.")
        cells.setdefault(name, {})[int(k)] = value
    if not cells:
        raise ValueError("There are no metrics to format. Pass the result of `XMCMetrics.compute()`.")
    ks = sorted({k for row in cells.values() for k in row})
    header = ["%", *(f"@{k}" for k in ks)]
    rows = [[name, *(_percent(row.get(k), digits) for k in ks)] for name, row in cells.items()]
    return _table(header, rows, markdown)


def format_by_frequency(
    rows: Sequence[Mapping[str, Any]], *, k: int = 5, markdown: bool = False, digits: int = 2
) -> str:
    """
    Formats results by label frequency as a table, with one row per bucket and shares in percent.

    Args:
        rows (`Sequence[Mapping[str, Any]]`): Result of [`XMCMetrics.by_frequency`].
        k (`int`, *optional*, defaults to 5): Cutoff of the ranking.
        markdown (`bool`, *optional*, defaults to `False`): Whether to write a Markdown table instead of aligned text.
        digits (`int`, *optional*, defaults to 2): Digits after the point.
    """
    check_buckets(rows, k)
    header = ["training documents", "labels", "true labels", "positives"]
    header += [f"{name}@{k} %" for name in _BUCKET_METRICS]
    lines = [
        [str(row["bucket"]), *(f"{row[name]:,}" for name in ("labels", "true_labels", "positives"))]
        + [_percent(row[f"{name}@{k}"], digits) for name in _BUCKET_METRICS]
        for row in rows
    ]
    return _table(header, lines, markdown)


def format_recall(rows: Sequence[Mapping[str, Any]], *, k: int = 5) -> str:
    """Formats the recall by label frequency, see [`XMCMetrics.by_frequency`], as a small table."""
    check_buckets(rows, k)
    header = ["documents of a label", "labels", f"R@{k} %"]
    rows = [row for row in rows if row["labels"]]
    lines = [[str(row["bucket"]), f"{row['labels']:,}", _percent(row[f"recall@{k}"], 1)] for row in rows]
    return _table(header, lines, markdown=False)


def check_buckets(rows: Sequence[Mapping[str, Any]], k: int) -> None:
    """Raises if the rows have no results at k."""
    if not rows:
        raise ValueError("There are no buckets to show. Pass the result of `XMCMetrics.by_frequency()`.")
    if f"recall@{k}" not in rows[0]:
        known = ", ".join(key.removeprefix("recall@") for key in rows[0] if key.startswith("recall@"))
        raise ValueError(
            f"There are no results for k = {k} (there are: {known or 'none'}). Add it to the `ks` of XMCMetrics."
        )


def _percent(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> str:
    """Aligned columns: the first to the left, numbers to the right."""
    if markdown:
        header, *rows = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    if markdown:
        widths = [max(width, 3) for width in widths]
    lines = [
        [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in (header, *rows)
    ]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in lines)
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


# ---- Plots ----

# Stages that took a smaller fraction of the time than this are not shown separately.
_MIN_FRACTION = 0.01


def plot_by_frequency(
    rows: Sequence[Mapping[str, Any]], path: str | os.PathLike, *, k: int = 5, title: str | None = None
) -> None:
    """Writes a PNG plot of recall, precision and coverage by label frequency, see [`XMCMetrics.by_frequency`]."""
    check_buckets(rows, k)
    figure = _make_figure("plot_by_frequency", width=7)
    axes = figure.subplots()
    names = [f"{name}@{k}" for name in ("recall", "precision", "coverage")]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        values = [(j, row[name]) for j, row in enumerate(rows) if row[name] is not None]
        positions = [j + (i - (len(names) - 1) / 2) * width for j, _ in values]
        axes.bar(positions, [100 * value for _, value in values], width, label=name)
    axes.set_xticks(range(len(rows)), [f"{row['bucket']}\n{row['true_labels']:,} labels" for row in rows])
    axes.set_xlabel("training documents per label, and number of such labels among the true labels")
    axes.set_ylabel("%")
    axes.set_xlim(-0.5, len(rows) - 0.5)
    axes.set_ylim(0, 100)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False)  # does not cover any bar
    if title:
        axes.set_title(title)
    _save(figure, path)


def plot_training(
    stages: Mapping[str, float],
    levels: Sequence[Mapping[str, float]],
    path: str | os.PathLike,
    *,
    seconds: float | None = None,
) -> None:
    """
    Writes a PNG plot of a training: seconds by stage and, if an encoder was fine-tuned, the loss by level.

    `levels` are log entries with `level`, `step` and `loss`, and may be empty. `seconds` is the duration of the whole
    training, by default the sum of the stages.
    """
    if not stages:
        raise ValueError("`stages` is empty: the record of the training has no stages to plot.")
    figure = _make_figure("plot_training", width=10 if levels else 7)
    panels = figure.subplots(1, 2 if levels else 1, squeeze=False)[0]
    _plot_stages(panels[0], stages, seconds or 0.0)
    if levels:
        _plot_levels(panels[1], levels)
    _save(figure, path)


def _make_figure(function: str, width: float) -> Any:
    try:
        # Not pyplot, which chooses a backend and keeps every figure in memory.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"`{function}` needs matplotlib, which is not installed: pip install matplotlib.") from error
    return Figure(figsize=(width, 4), layout="constrained")


def _save(figure: Any, path: str | os.PathLike) -> None:
    with atomic_write(path) as temporary:
        # Without the version of matplotlib in the file, equal plots are equal files.
        figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})


def _plot_stages(axes: Any, stages: Mapping[str, float], seconds: float) -> None:
    total = max(seconds, sum(stages.values()))
    values = {name: value for name, value in stages.items() if value >= _MIN_FRACTION * total}
    rest = total - sum(values.values())
    if rest >= _MIN_FRACTION * total:
        values["other"] = rest
    names = sorted(values, key=lambda name: values[name])
    bars = axes.barh(names, [values[name] for name in names])
    axes.bar_label(bars, fmt=lambda value: f"{value:,.0f} s" if value >= 100 else f"{value:.2g} s", padding=3)
    axes.margins(x=0.2)
    axes.set_xlabel("seconds")
    axes.set_title("Time by stage")


def _plot_levels(axes: Any, levels: Sequence[Mapping[str, float]]) -> None:
    for level in sorted({entry["level"] for entry in levels}):
        entries = [entry for entry in levels if entry["level"] == level]
        steps, losses = [entry["step"] for entry in entries], [entry["loss"] for entry in entries]
        axes.plot(steps, losses, marker="o", markersize=3, label=f"level {level:.0f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title("Loss by level of the tree")
