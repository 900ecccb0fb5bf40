"""Metrics, their tables and plots, and the module for the `evaluate` library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .metrics import XMCMetrics, propensities
from .report import format_by_frequency, format_metrics, plot_by_frequency

if TYPE_CHECKING:
    import evaluate

__all__ = [
    "METRIC_PATH",
    "XMCMetrics",
    "format_by_frequency",
    "format_metrics",
    "load_metric",
    "plot_by_frequency",
    "propensities",
]

METRIC_PATH = str(Path(__file__).parent / "xmc_metrics")
"""Folder of the `evaluate` module: `evaluate.load(METRIC_PATH)`."""


def load_metric(**kwargs: Any) -> evaluate.EvaluationModule:
    """
    Loads the metrics as a module of the `evaluate` library.

    Args:
        kwargs:
            Passed to `evaluate.load`: `experiment_id`, `num_process`, `process_id`, `keep_in_memory`, `cache_dir`.
    """
    try:
        import evaluate
    except ImportError as error:
        raise ImportError(
            "`load_metric` needs the evaluate library: pip install evaluate. XMCMetrics works without it."
        ) from error
    return evaluate.load(METRIC_PATH, **kwargs)
