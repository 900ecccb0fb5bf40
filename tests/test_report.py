"""Tables and the plot of results."""

import sys

import numpy as np
import pytest
from scipy import sparse

from hf_xmc.evaluation import XMCMetrics, format_by_frequency, format_metrics, plot_by_frequency


@pytest.fixture
def metrics():
    metrics = XMCMetrics(counts=[120, 4, 1], num_documents=200, ks=(1, 2))
    metrics.update(np.array([[0, 1], [0, 2]]), sparse.csr_matrix([[1, 1, 0, 0], [0, 0, 1, 1]]))
    return metrics


def test_metrics_as_text():
    table = format_metrics({"P@1": 0.91554, "P@10": 0.5, "tail-coverage@1": 1.0})
    assert table.splitlines() == [
        "%                  @1    @10",
        "P               91.55  50.00",
        "tail-coverage  100.00      -",
    ]


def test_metrics_as_markdown():
    table = format_metrics({"P@1": 0.91554, "P@3": 0.5, "R@3": 0.25}, markdown=True, digits=1)
    assert table.splitlines() == [
        "| %   |   @1 |   @3 |",
        "| --- | ---: | ---: |",
        "| P   | 91.6 | 50.0 |",
        "| R   |    - | 25.0 |",
    ]


def test_by_frequency_as_text(metrics):
    lines = format_by_frequency(metrics.by_frequency(), k=2).splitlines()
    assert " ".join(lines[0].split()) == (
        "training documents labels true labels positives recall@2 % precision@2 % coverage@2 % contribution@2 %"
    )
    assert [line.split() for line in lines[1:]] == [
        ["0", "1", "1", "1", "0.00", "-", "0.00", "0.00"],
        ["1-5", "2", "2", "2", "100.00", "100.00", "100.00", "50.00"],
        ["6-20", "0", "0", "0", "-", "-", "-", "0.00"],
        ["21-100", "0", "0", "0", "-", "-", "-", "0.00"],
        [">100", "1", "1", "1", "100.00", "50.00", "100.00", "25.00"],
    ]
    assert len({len(line) for line in lines}) == 1  # aligned


def test_by_frequency_as_markdown(metrics):
    lines = format_by_frequency(metrics.by_frequency(), k=1, markdown=True).splitlines()
    assert len(lines) == 7
    assert all(line.startswith("| ") and line.endswith(" |") and line.count("|") == 9 for line in lines)
    assert set(lines[1]) == set("| -:")


def test_plot(metrics, tmp_path):
    matplotlib_image = pytest.importorskip("matplotlib.image")
    before = "matplotlib.pyplot" in sys.modules
    rows = metrics.by_frequency()
    first, second = tmp_path / "new" / "first.png", tmp_path / "second.png"
    plot_by_frequency(rows, first, k=1, title="Sample")
    plot_by_frequency(rows, str(second), k=1, title="Sample")
    assert first.read_bytes().startswith(b"\x89PNG")
    assert first.read_bytes() == second.read_bytes()
    image = matplotlib_image.imread(first)
    assert image.shape[0] > 300 and image.shape[1] > 600
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 3  # bars in three colours on white
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "second.png"]  # no temporary file left
    assert ("matplotlib.pyplot" in sys.modules) == before  # no backend was chosen


def test_bad_input(metrics, tmp_path):
    with pytest.raises(ValueError, match="`loss`"):
        format_metrics({"P@1": 0.5, "loss": 0.1})
    with pytest.raises(ValueError, match="compute"):
        format_metrics({})
    with pytest.raises(ValueError, match="by_frequency"):
        format_by_frequency([])
    for function in (format_by_frequency, lambda rows, k: plot_by_frequency(rows, tmp_path / "plot.png", k=k)):
        with pytest.raises(ValueError, match="k = 5.*1, 2"):
            function(metrics.by_frequency(), k=5)
