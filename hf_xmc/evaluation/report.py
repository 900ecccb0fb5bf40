"""Tables of the results of [`XMCMetrics`]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_BUCKET_METRICS = ("recall", "precision", "coverage", "contribution")


def format_metrics(metrics: Mapping[str, float], *, markdown: bool = False, digits: int = 2) -> str:
    """
    Formats metrics as a table in percent, with one row per metric and one column per k.

    Args:
        metrics (`Mapping[str, float]`):
            Result of [`XMCMetrics.compute`]: fractions by names such as `"P@5"`.
        markdown (`bool`, *optional*, defaults to `False`):
            Whether to write a Markdown table instead of aligned text.
        digits (`int`, *optional*, defaults to 2):
            Digits after the point.
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
        rows (`Sequence[Mapping[str, Any]]`):
            Result of [`XMCMetrics.by_frequency`].
        k (`int`, *optional*, defaults to 5):
            Cutoff of the ranking.
        markdown (`bool`, *optional*, defaults to `False`):
            Whether to write a Markdown table instead of aligned text.
        digits (`int`, *optional*, defaults to 2):
            Digits after the point.
    """
    check_buckets(rows, k)
    header = [
        "training documents",
        "labels",
        "true labels",
        "positives",
        *(f"{name}@{k} %" for name in _BUCKET_METRICS),
    ]
    lines = [
        [str(row["bucket"]), *(f"{row[name]:,}" for name in ("labels", "true_labels", "positives"))]
        + [_percent(row[f"{name}@{k}"], digits) for name in _BUCKET_METRICS]
        for row in rows
    ]
    return _table(header, lines, markdown)


def format_recall(rows: Sequence[Mapping[str, Any]], *, k: int = 5) -> str:
    """
    Formats the recall by label frequency as a small table.

    Args:
        rows (`Sequence[Mapping[str, Any]]`): Result of [`XMCMetrics.by_frequency`].
        k (`int`, *optional*, defaults to 5): Cutoff of the ranking.
    """
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
