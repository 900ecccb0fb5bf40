"""Metrics: against the oracles, by hand, batching, bad input, speed and memory; their tables and plots."""

import copy
import math
import pickle
import sys
import tracemalloc
from functools import partial

import metric_oracles as oracles
import numpy as np
import pytest
from conftest import refused
from scipy import sparse

from hf_xmc.evaluation import XMCMetrics, format_by_frequency, format_metrics, plot_by_frequency, propensities
from hf_xmc.evaluation import metrics as metrics_module
from hf_xmc.hierarchy import Hierarchy

KS = (1, 3, 5, 8)


def to_csr(rows, width):
    """Sparse truth of lists of label ids."""
    truth = sparse.lil_matrix((len(rows), width), dtype=np.float32)
    for i, row in enumerate(rows):
        truth[i, row] = 1
    return truth.tocsr()


def random_case(seed, documents=60, known=25, unseen=4):
    """Predictions with empty places, documents without truth, labels unseen in training, hits at all places."""
    rng = np.random.default_rng(seed)
    num_documents = 150
    counts = np.minimum(rng.zipf(1.3, known) - 1, num_documents)
    counts[:5] = [0, 1, 5, 6, 101]
    predictions, truth = [], []
    for _ in range(documents):
        true = rng.choice(known + unseen, rng.integers(0, 14), replace=False).tolist()
        row = rng.permutation(known)[: KS[-1]]
        row[rng.random(len(row)) < 0.1] = -1
        predictions.append(row.tolist())
        truth.append(true)
    return predictions, truth, counts, num_documents, known + unseen


def expected(predictions, truth, counts, num_documents, width, tail_max_count=5, **propensity):
    """All metrics by the oracles."""
    results = {}
    for k in KS:
        results.update(oracles.ranking_metrics(predictions, truth, k))
        results.update(oracles.propensity_metrics(predictions, truth, counts, num_documents, k, **propensity))
        results.update(oracles.f1_metrics(predictions, truth, width, k))
        tail = oracles.bucket_metrics(predictions, truth, width, counts, k, 0, tail_max_count)
        results[f"tail-coverage@{k}"] = tail[f"coverage@{k}"]
    return results


@pytest.mark.parametrize("seed", range(5))
def test_all_metrics_equal_the_oracles(seed):
    predictions, truth, counts, num_documents, width = random_case(seed)
    metrics = XMCMetrics(counts=counts, num_documents=num_documents, ks=KS)
    metrics.update(np.array(predictions), to_csr(truth, width))
    assert metrics.compute() == pytest.approx(expected(predictions, truth, counts, num_documents, width), abs=1e-9)


def random_parents(known, seed=0):
    """Parents with higher ids: no cycles. Some labels have several, some none."""
    rng = np.random.default_rng(seed)
    return [sorted({int(i) for i in rng.integers(label + 1, known, rng.integers(0, 3))}) if label < known - 1 else []
            for label in range(known)]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("with_counts", [True, False])
def test_hierarchical_metrics_equal_the_oracle(seed, with_counts):
    predictions, truth, counts, num_documents, width = random_case(seed)
    parents = random_parents(len(counts), seed)
    frequencies = {"counts": counts, "num_documents": num_documents} if with_counts else {}
    metrics = [XMCMetrics(ks=KS, hierarchy=Hierarchy(parents), **frequencies) for _ in range(2)]
    for part, rows in zip(metrics, (slice(0, 25), slice(25, None)), strict=True):
        part.update(np.array(predictions[rows]), to_csr(truth[rows], width))
    metrics[0].merge(metrics[1])
    wanted = {}
    for k in KS:
        wanted.update(oracles.hierarchical_metrics(predictions, truth, parents, k))
    results = metrics[0].compute()
    assert {name: results[name] for name in wanted} == pytest.approx(wanted, abs=1e-12)
    plain = XMCMetrics(ks=KS, **frequencies)
    plain.update(np.array(predictions), to_csr(truth, width))
    assert {name: results[name] for name in results if name not in wanted} == pytest.approx(plain.compute())
    refused("hierarchy", metrics[0].merge, plain)
    if with_counts:
        refused("`hierarchy` is of 3 labels", XMCMetrics, hierarchy=Hierarchy([[], [], []]), **frequencies)


def test_a_parent_counts_in_part():
    # 2 is below 1, which is below 0; 3 is apart.
    metrics = XMCMetrics(ks=[1], hierarchy=Hierarchy([[], [0], [1], []]))
    metrics.update(np.array([[1], [3]]), to_csr([[2], [2]], 4))
    # Predicted are {0, 1} and {3}, true {0, 1, 2} twice.
    assert metrics.compute()["hP@1"] == 2 / 3 and metrics.compute()["hR@1"] == 2 / 6
    assert metrics.compute()["hF1@1"] == 4 / 9


def test_settings_reach_the_metrics():
    predictions, truth, counts, num_documents, width = random_case(7)
    metrics = XMCMetrics(counts=counts, num_documents=num_documents, ks=KS, a=0.6, b=2.6, tail_max_count=1)
    metrics.update(np.array(predictions), to_csr(truth, width))
    wanted = expected(predictions, truth, counts, num_documents, width, tail_max_count=1, a=0.6, b=2.6)
    assert metrics.compute() == pytest.approx(wanted, abs=1e-9)
    default = expected(predictions, truth, counts, num_documents, width)
    assert wanted["PSP@3"] != pytest.approx(default["PSP@3"])
    assert wanted["tail-coverage@3"] != pytest.approx(default["tail-coverage@3"])


@pytest.mark.parametrize(
    "limits, names", [((0, 5, 20, 100), "0 1-5 6-20 21-100 >100"), ((2, 3, 50), "0-2 3 4-50 >50")]
)
def test_by_frequency_equals_the_oracle(limits, names):
    predictions, truth, counts, num_documents, width = random_case(11)
    metrics = XMCMetrics(counts=counts, num_documents=num_documents, ks=KS, bucket_limits=limits)
    metrics.update(np.array(predictions), to_csr(truth, width))
    rows = metrics.by_frequency()
    edges = [*zip((0, *(limit + 1 for limit in limits)), (*limits, math.inf), strict=True)]
    assert [row["bucket"] for row in rows] == names.split()
    for row, (low, high) in zip(rows, edges, strict=True):
        assert (row["min_count"], row["max_count"]) == (low, None if high == math.inf else high)
        for k in KS:
            wanted = oracles.bucket_metrics(predictions, truth, width, counts, k, low, high)
            assert {key: row[key] for key in wanted} == pytest.approx(wanted)
    assert sum(row["labels"] for row in rows) == width
    assert sum(row["contribution@3"] for row in rows) == pytest.approx(metrics.compute()["P@3"])


def test_values_worked_out_by_hand():
    # Document 0: labels 0 and 2 are true, ranking 2, 1, 0. Document 1: label 3 (unseen) is true, ranking 0, 1, empty.
    metrics = XMCMetrics(counts=[10, 3, 0], num_documents=100, ks=(1, 3))
    metrics.update(np.array([[2, 1, 0], [0, 1, -1]]), to_csr([[0, 2], [3]], 4))
    result = metrics.compute()
    assert result["P@1"] == 1 / 2
    assert result["P@3"] == 2 / 6
    assert result["R@1"] == (1 / 2 + 0) / 2
    assert result["RP@1"] == 1 / 2
    assert result["R@3"] == result["RP@3"] == 1 / 2
    assert result["nDCG@3"] == pytest.approx((1 + 1 / 2) / (1 + 1 / math.log2(3)) / 2)
    weight = [oracles.inverse_propensity(count, 100) for count in (10, 3, 0)]
    assert result["PSP@1"] == pytest.approx(weight[2] / (2 * weight[2]))
    assert result["PSP@3"] == pytest.approx((weight[2] + weight[0]) / (2 * weight[2] + weight[0]))
    assert result["micro-F1@3"] == pytest.approx(2 * 2 / (5 + 3))
    # Label 0: precision 1/2, recall 1. Label 1: never true. Label 2: perfect. Label 3: never predicted.
    assert result["macro-F1@3"] == pytest.approx((2 / 3 + 0 + 1 + 0) / 4)
    # Tail labels in the truth: 2 (found) and 3 (not found).
    assert result["tail-coverage@3"] == 1 / 2


def test_undefined_metrics_are_left_out():
    metrics = XMCMetrics(counts=[40, 20], num_documents=50, ks=[1])
    metrics.update(np.array([[-1]]), to_csr([[]], 2))
    assert metrics.compute() == {"P@1": 0, "nDCG@1": 0}
    metrics.update(np.array([[0]]), to_csr([[0]], 2))
    result = metrics.compute()
    assert result["R@1"] == 1
    assert not any(name.startswith("tail-coverage") for name in result)
    assert metrics.by_frequency()[1]["recall@1"] is None
    assert all(isinstance(value, float) for value in result.values())


def test_without_counts():
    predictions, truth, counts, num_documents, width = random_case(3)
    metrics = XMCMetrics(ks=KS)
    metrics.update(np.array(predictions), to_csr(truth, width))
    wanted = expected(predictions, truth, counts, num_documents, width)
    absent = ("PSP", "PSnDCG", "tail-coverage")
    assert metrics.compute() == pytest.approx({k: v for k, v in wanted.items() if not k.startswith(absent)})
    refused("`counts`", metrics.by_frequency)


@pytest.mark.parametrize("batch", [1, 7, 59])
def test_batches_and_their_order_do_not_matter(batch, monkeypatch):
    predictions, truth, counts, num_documents, width = random_case(5)
    indices, matrix = np.array(predictions), to_csr(truth, width)
    whole, parts, inner = (XMCMetrics(counts=counts, num_documents=num_documents, ks=KS) for _ in range(3))
    whole.update(indices, matrix)
    for start in reversed(range(0, len(indices), batch)):
        parts.update(indices[start : start + batch], matrix[start : start + batch])
    monkeypatch.setattr(metrics_module, "_BATCH", batch)
    inner.update(indices, matrix)
    assert parts.compute() == inner.compute() == whole.compute()  # to the last bit
    assert parts.by_frequency() == whole.by_frequency()


def test_merge_equals_one_pass():
    predictions, truth, counts, num_documents, width = random_case(6)
    indices, matrix = np.array(predictions), to_csr(truth, width)
    first, second, whole, empty = (XMCMetrics(counts=counts, num_documents=num_documents, ks=KS) for _ in range(4))
    first.update(indices[:20], matrix[:20, : len(counts)])  # this process has met no unseen label
    second.update(indices[20:], matrix[20:])
    for rows, part in ((slice(20), matrix[:20, : len(counts)]), (slice(20, None), matrix[20:])):
        whole.update(indices[rows], part)
    second = pickle.loads(pickle.dumps(second))  # as objects travel between processes
    merged = copy.deepcopy(first)
    merged.merge(second)
    second.merge(first)
    empty.merge(whole)
    assert merged.compute() == second.compute() == empty.compute() == whole.compute() != first.compute()
    assert merged.documents == len(predictions)


def test_merge_needs_equal_settings():
    metrics = XMCMetrics(counts=[1, 2], num_documents=3)
    for name, other in {
        "ks": XMCMetrics(counts=[1, 2], num_documents=3, ks=[1]),
        "counts": XMCMetrics(counts=[2, 2], num_documents=3),
        "num_documents": XMCMetrics(counts=[1, 2], num_documents=4),
        "a": XMCMetrics(counts=[1, 2], num_documents=3, a=0.5),
    }.items():
        refused(f"`{name}`", metrics.merge, other)
    refused("`", metrics.merge, XMCMetrics())
    refused("dict", metrics.merge, {}, error=TypeError)


def test_truth_in_any_sparse_form():
    predictions, truth, counts, num_documents, width = random_case(8)
    matrix = to_csr(truth, width)
    reference = XMCMetrics(counts=counts, num_documents=num_documents, ks=KS)
    reference.update(np.array(predictions), matrix)
    ptr, ids, ones = matrix.indptr, matrix.indices, np.ones(2 * matrix.nnz, np.int8)
    unsorted = matrix.copy()
    unsorted.indices = np.concatenate([ids[first:end][::-1] for first, end in zip(ptr[:-1], ptr[1:], strict=True)])
    unsorted.has_sorted_indices = False
    twice = sparse.csr_matrix((ones, np.repeat(ids, 2), 2 * ptr), shape=matrix.shape)
    everything = tuple(np.indices(matrix.shape).reshape(2, -1))
    zeros = sparse.csr_matrix((matrix.toarray().ravel(), everything), shape=matrix.shape)
    forms = (unsorted, twice, zeros, matrix.astype(bool), sparse.csr_array(matrix), matrix.tocoo(), matrix * 0.25)
    for other in forms:
        before = other.copy()
        metrics = XMCMetrics(counts=counts, num_documents=num_documents, ks=KS)
        metrics.update(np.array(predictions, np.int32), other)
        assert metrics.compute() == reference.compute()
        assert np.array_equal(other.data, before.data) and other.nnz == before.nnz  # the caller's matrix is left alone


def test_columns_beyond_k_are_ignored_and_ks_sorted():
    predictions, truth, counts, num_documents, width = random_case(9)
    indices, matrix = np.array(predictions), to_csr(truth, width)
    few, sliced = (XMCMetrics(counts=counts, num_documents=num_documents, ks=ks) for ks in ([3, 1], (1, 3)))
    few.update(indices, matrix)
    sliced.update(indices[:, :3], matrix)
    assert few.ks == (1, 3)
    assert few.compute() == sliced.compute()


def test_empty_batch_and_nothing_at_all():
    metrics = XMCMetrics(counts=[1, 1], num_documents=2, ks=[1])
    metrics.update(np.zeros((0, 1), int), sparse.csr_matrix((0, 2)))
    refused("`update`", metrics.compute)
    refused("`update`", metrics.by_frequency)


NAN = float("nan")
BAD_UPDATES = {
    "duplicate": ([[0, 1, 2], [2, 0, 2]], [[0], [1]], ValueError, "label id 2 more than once in row 1"),
    "too large": ([[0, 1, 2], [3, 0, 1]], [[0], [1]], ValueError, "label id 3 in row 1, but there are 3 labels"),
    "negative": ([[0, 1, 2], [-2, 0, 1]], [[0], [1]], ValueError, "label id -2 in row 1"),
    "few columns": ([[0, 1], [0, 1]], [[0], [1]], ValueError, "2 columns, too few for k = 3"),
    "rows": ([[0, 1, 2]], [[0], [1]], ValueError, "`indices` has 1 rows but `truth` has 2"),
    "one dimension": ([0, 1, 2], [[0], [1]], ValueError, "`indices`"),
    "nan": ([[0, 1, NAN], [0, 1, 2]], [[0], [1]], ValueError, "`indices`"),
    "scores": ([[0.9, 0.5, 0.1], [0.9, 0.5, 0.1]], [[0], [1]], TypeError, "`indices`"),
    "strings": ([["a", "b", "c"], ["a", "b", "c"]], [[0], [1]], TypeError, "`indices`"),
}


@pytest.mark.parametrize("indices, truth, error, message", BAD_UPDATES.values(), ids=BAD_UPDATES)
def test_bad_predictions_change_nothing(indices, truth, error, message):
    metrics = XMCMetrics(counts=[5, 2, 1], num_documents=9, ks=(1, 3))
    metrics.update(np.array([[0, 1, 2]]), to_csr([[1]], 3))
    before = metrics.compute()
    refused(message, metrics.update, np.array(indices), to_csr(truth, 4), error=error)
    assert metrics.compute() == before


def test_bad_truth():
    metrics = XMCMetrics(counts=[5, 2, 1], num_documents=9, ks=[1])
    indices = np.array([[0], [1]])
    refused("`truth`", metrics.update, indices, to_csr([[0], [1]], 2))
    refused("`truth`", metrics.update, indices, np.eye(2, 3), error=TypeError)
    for value in (NAN, float("inf"), -1.0):
        truth = to_csr([[0], [1, 2]], 3)
        truth.data[2] = value
        refused(f"`truth`.* {value} in row 1", metrics.update, indices, truth)
    truth = to_csr([[0], [1]], 3)
    truth.indices[1] = 7
    refused("`truth`", metrics.update, indices, truth)


def test_bad_settings():
    counted = partial(XMCMetrics, num_documents=3)
    refused("`num_documents`", XMCMetrics, counts=[1])
    refused("`counts`", counted)
    for count in (-1, 4, NAN, 0.5):
        refused(f"label 1 has {count}", counted, counts=[1, count])
    refused("`counts`", counted, counts=[[1]])
    refused("`num_documents`", XMCMetrics, counts=[0], num_documents=0)
    for name, value in (("a", 0.0), ("b", NAN)):
        refused(f"{name} > 0", counted, counts=[0], **{name: value})
    for ks in ([], [0, 1], [1.5], [3, 3]):
        refused("`ks`", XMCMetrics, ks=ks)
    refused("`bucket_limits`", XMCMetrics, bucket_limits=[-1])


def test_propensities():
    counts = [0, 1, 7, 900]
    wanted = [1 / oracles.inverse_propensity(count, 1000, 0.6, 2.6) for count in counts]
    assert propensities(counts, 1000, a=0.6, b=2.6) == pytest.approx(wanted)
    default = propensities(np.array(counts), 1000)
    assert (np.diff(default) > 0).all() and (default > 0).all() and (default < 1).all()
    assert propensities([0, 1, 2], 2).tolist() == [1, 1, 1]  # too few documents for the model


def test_memory_does_not_grow_with_documents():
    indices = np.tile(np.arange(10), (60_000, 1))
    truth = sparse.random(60_000, 1_000, 0.005, "csr", np.float32, np.random.default_rng(0))
    metrics = XMCMetrics(counts=np.full(1_000, 300), num_documents=60_000)
    metrics.update(indices[:20_000], truth[:20_000])
    size = len(pickle.dumps(metrics))
    tracemalloc.start()
    metrics.update(indices[:20_000], truth[:20_000])
    peak_small = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    metrics.update(indices, truth)
    peak_large = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(pickle.dumps(metrics)) == size
    assert peak_large < 1.2 * peak_small + indices.nbytes / 2


# ---- Tables and plots ----


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
    refused("`loss`", format_metrics, {"P@1": 0.5, "loss": 0.1})
    refused("compute", format_metrics, {})
    refused("by_frequency", format_by_frequency, [])
    for function in (format_by_frequency, lambda rows, k: plot_by_frequency(rows, tmp_path / "plot.png", k=k)):
        refused("k = 5.*1, 2", function, metrics.by_frequency(), k=5)
