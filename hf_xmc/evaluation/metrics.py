"""
Metrics of extreme multi-label classification, from ranked label ids and sparse truth.

Every result is a ratio of integer counts. It does not depend on the batch size, the order of the batches or the number
of processes, to the last bit, and the memory does not grow with the number of documents.

Let `n` be the number of true labels of a document, `hit_j` 1 if the label at rank `j` is true and 0 otherwise,
`d_j = 1/log2(j + 1)`, `Z_m = d_1 + ... + d_m` and `w_l = 1/p_l` the inverse propensity of a label:

| metric            | definition                                                                                      |
|-------------------|-------------------------------------------------------------------------------------------------|
| `P@k`             | mean over all documents of (hits in the top k) / k                                              |
| `nDCG@k`          | mean over all documents of (sum of `hit_j d_j`) / `Z_min(k,n)`                                  |
| `R@k`             | mean over documents with a true label of (hits in the top k) / n                                |
| `RP@k`            | mean over documents with a true label of (hits in the top k) / min(k, n)                        |
| `PSP@k`           | (sum of `w_l` of all hits) / (the same for the best possible ranking), sums over all documents  |
| `PSnDCG@k`        | (sum of `w_l d_j / Z_min(k,n)` of all hits) / (the same for the best possible ranking)          |
| `micro-F1@k`      | F1 of the pooled decisions: the top k are predicted, everything else is not                     |
| `macro-F1@k`      | mean of the F1 of each label with at least one true or predicted (top k) occurrence             |
| `tail-coverage@k` | share of the tail labels with a true occurrence that are a hit in the top k of some document    |
| `hP@k`            | (sum of labels that `A(top k)` and `A(true)` share) / (sum of the sizes of `A(top k)`)          |
| `hR@k`            | (sum of labels that `A(top k)` and `A(true)` share) / (sum of the sizes of `A(true)`)           |
| `hF1@k`           | harmonic mean of `hP@k` and `hR@k` (Kiritchenko et al., 2006)                                   |

Conventions:

- A document without a true label stays in `P@k` and `nDCG@k` with 0, its predictions are false positives of both F1,
  and it is left out of `R@k` and `RP@k`, where it has no value. It adds nothing to the sums of `PSP@k` and `PSnDCG@k`.
- A label unseen in training has a training count of 0. It is a true label like any other: it counts in `n`, in the
  best possible ranking (with the largest `w_l`), in both F1 and among the tail labels, so not predicting it is a miss.
- An empty rank (-1) is a miss for `P@k`, but not a prediction for both F1.
- The last three need a hierarchy. `A` adds all ancestors to a set of labels, sums are over all documents. A wrong
  label that shares ancestors with a true one, or is its parent or child, counts in part. A label outside the hierarchy
  has no ancestors.
- A metric without a denominator (e.g., no tail label in the truth) is left out of the result. Without training counts,
  so are the metrics that need them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import sparse

from ..hierarchy import Hierarchy
from .metric_checks import check_counts, check_increasing, check_indices, check_rows, check_truth

# Documents per step of an update, which bounds the temporary arrays.
_BATCH = 16_384
# Discounts in PSnDCG@k are whole multiples of this, so that their sums are exact: room for 2**27 documents.
_UNIT = 2.0**-36


def propensities(
    counts: np.ndarray | Sequence[int], num_documents: int, a: float = 0.55, b: float = 1.5
) -> np.ndarray:
    """
    Propensity of each label (Jain et al., 2016): the probability that a true label is recorded.

    `p_l = 1 / (1 + C exp(-a log(n_l + b)))` with `C = (log N - 1)(b + 1)^a`. For fewer than three documents, where the
    formula is not defined, `C` is 0 and all propensities are 1.

    Args:
        counts (`np.ndarray`): Number of training documents of each label.
        num_documents (`int`): Number of training documents.
        a (`float`, *optional*, defaults to 0.55): Exponent of the propensity model.
        b (`float`, *optional*, defaults to 1.5): Offset of the propensity model.
    """
    counts = check_counts(counts, num_documents)
    if not (a > 0 and b > 0):
        raise ValueError(
            f"The propensity model needs a > 0 and b > 0, got a={a} and b={b}. The usual values: 0.55 and 1.5."
        )
    scale = max(np.log(num_documents) - 1, 0.0) * (b + 1) ** a
    return 1 / (1 + scale * np.exp(-a * np.log(counts + b)))


class XMCMetrics:
    """
    Accumulates the counts from which all metrics are computed. See the module's docstring for the definitions.

    Args:
        counts (`np.ndarray`, *optional*):
            Number of training documents of each label, shape `(num_labels,)`. Propensity-scored metrics, tail coverage
            and results by frequency need it.
        num_documents (`int`, *optional*): Number of training documents; required with `counts`.
        ks (`Iterable[int]`, *optional*, defaults to `(1, 3, 5, 10)`): Cutoffs of the ranking.
        a (`float`, *optional*, defaults to 0.55): Exponent of the propensity model.
        b (`float`, *optional*, defaults to 1.5): Offset of the propensity model.
        tail_max_count (`int`, *optional*, defaults to 5):
            A label with at most this many training documents is a tail label.
        bucket_limits (`Iterable[int]`, *optional*, defaults to `(0, 5, 20, 100)`):
            Largest training count of each bucket of [`~XMCMetrics.by_frequency`]; one more bucket takes all above.
        hierarchy ([`Hierarchy`], *optional*):
            The parents of the labels, `labels.hierarchy`. Hierarchical metrics need it.

    Example:
    ```python
    metrics = XMCMetrics(counts=labels.counts, num_documents=labels.num_documents)
    for indices, truth in batches:
        metrics.update(indices, truth)
    metrics.compute()["P@1"]
    ```
    """

    def __init__(
        self,
        *,
        counts: np.ndarray | Sequence[int] | None = None,
        num_documents: int | None = None,
        ks: Iterable[int] = (1, 3, 5, 10),
        a: float = 0.55,
        b: float = 1.5,
        tail_max_count: int = 5,
        bucket_limits: Iterable[int] = (0, 5, 20, 100),
        hierarchy: Hierarchy | None = None,
    ) -> None:
        if (counts is None) != (num_documents is None):
            missing = "counts" if counts is None else "num_documents"
            raise ValueError(f"`{missing}` is missing. Pass both `counts` and `num_documents`, or neither.")
        self.ks = check_increasing("ks", ks, smallest=1)
        self.a, self.b = a, b
        self.tail_max_count = tail_max_count
        self.bucket_limits = check_increasing("bucket_limits", bucket_limits, smallest=0)
        self.num_documents = num_documents
        self.hierarchy = hierarchy
        self.counts: np.ndarray | None = None
        k = self.ks[-1]
        # Index of the smallest k that includes a rank; all larger ones do, too.
        self._first_k = np.searchsorted(self.ks, np.arange(1, k + 1))
        self._tables: dict[str, np.ndarray] = {
            "documents": np.zeros(0, np.int64),  # by number of true labels
            "hits": np.zeros((0, k), np.int64),  # by number of true labels and rank
        }
        num_labels = 0
        if counts is not None and num_documents is not None:
            self.counts = check_counts(counts, num_documents)
            num_labels = len(self.counts)
            # Labels of equal training count have equal propensity: their gains share one cell. Class 0 is count 0.
            self._class_counts, classes = np.unique(np.append(self.counts, 0), return_inverse=True)
            self._weights = 1 / propensities(self._class_counts, num_documents, a, b)
            self._classes = classes[:-1].astype(np.int64)
            self._discounts = [_relative_discounts(k) for k in self.ks]
            for name in ("gain", "ideal_gain", "discounted_gain", "ideal_discounted_gain"):
                self._tables[name] = np.zeros((len(self.ks), len(self._class_counts)), np.int64)
        self._tables["true"] = np.zeros(num_labels, np.int64)
        if hierarchy is not None:
            if self.counts is not None and len(hierarchy) != len(self.counts):
                raise ValueError(f"`hierarchy` is of {len(hierarchy)} labels, but `counts` of {len(self.counts)}.")
            for name in ("true_above", "predicted_above", "shared_above"):
                self._tables[name] = np.zeros(len(self.ks), np.int64)
        # Per label, by the smallest k that includes the rank.
        self._tables["correct"] = np.zeros((len(self.ks), num_labels), np.int64)
        self._tables["predicted"] = np.zeros((len(self.ks), num_labels), np.int64)

    @property
    def documents(self) -> int:
        """Number of documents seen so far."""
        return int(self._tables["documents"].sum())

    def update(self, indices: np.ndarray, truth: sparse.csr_matrix | sparse.csr_array) -> None:
        """
        Adds a batch of documents. A batch with an error changes nothing.

        Args:
            indices (`np.ndarray`):
                Predicted label ids, best first, shape `(documents, k)` with `k` at least the largest of `ks`; -1 for
                an empty rank.
            truth (`scipy.sparse.csr_matrix`):
                True labels: a positive value in row `i` and column `l` if document `i` has label `l`. Columns beyond
                `len(counts)` are labels unseen in training; a column is the same label in all batches.
        """
        indices = check_indices(indices, self.ks[-1])
        truth = check_truth(truth)
        if indices.shape[0] != truth.shape[0]:
            raise ValueError(
                f"`indices` has {indices.shape[0]} rows but `truth` has {truth.shape[0]}. Both need one row per "
                "document, in the same order."
            )
        num_labels = truth.shape[1]
        if self.counts is not None:
            num_labels = len(self.counts)
            if truth.shape[1] < num_labels:
                raise ValueError(
                    f"`truth` has {truth.shape[1]} columns but `counts` has {num_labels} labels. Encode the truth "
                    "with the labels the model was trained with."
                )
        for start, rows in _batches(indices):
            check_rows(rows, start, num_labels)
        self._grow_labels(truth.shape[1])
        for start, rows in _batches(indices):
            self._count_batch(rows[:, : self.ks[-1]], truth.indptr[start : start + len(rows) + 1], truth.indices)

    def merge(self, other: XMCMetrics) -> None:
        """
        Adds the documents of another object with the same settings, e.g., from another process.

        Args:
            other ([`XMCMetrics`]): The other object, which does not change.
        """
        if not isinstance(other, XMCMetrics):
            raise TypeError(f"Only XMCMetrics can be merged into XMCMetrics, got {type(other).__name__}.")
        for name in ("ks", "a", "b", "tail_max_count", "bucket_limits", "num_documents", "counts"):
            if not np.array_equal(getattr(self, name), getattr(other, name)):
                raise ValueError(f"The metrics differ in `{name}`. Make all of them with the same arguments.")
        if getattr(self.hierarchy, "parents", None) != getattr(other.hierarchy, "parents", None):
            raise ValueError("The metrics differ in `hierarchy`. Make all of them with the same arguments.")
        self._grow_labels(len(other._tables["true"]))
        self._grow_documents(len(other._tables["documents"]))
        for name, theirs in other._tables.items():
            self._tables[name][tuple(slice(size) for size in theirs.shape)] += theirs

    def compute(self) -> dict[str, float]:
        """All metrics over the documents seen so far, as fractions between 0 and 1: `{"P@1": 0.83, ...}`."""
        if not self.documents:
            raise ValueError("There is nothing to compute: no document was added. Call `update` first.")
        results = self._ranking_metrics()
        if self.counts is not None:
            results.update(self._propensity_metrics())
        results.update(self._label_metrics())
        if self.hierarchy is not None:
            results.update(self._hierarchical_metrics())
        return {name: float(value) for name, value in results.items() if value is not None}

    def by_frequency(self) -> list[dict[str, Any]]:
        """
        Results by how often a label occurs in training, rare labels first.

        Returns:
            One row per bucket with `bucket` (its name), `min_count`, `max_count` (`None`: no limit), `labels` (number
            of labels), `true_labels` (labels with a true occurrence), `positives` (true occurrences) and for each k:

            - `recall@k`: share of the positives that are in the top k,
            - `precision@k`: share of the bucket's predictions in the top k that are true,
            - `coverage@k`: share of the true labels that are a hit at least once,
            - `contribution@k`: the part of `P@k` that comes from the bucket; the parts add up to `P@k`.

            A share is `None` if its denominator is 0.
        """
        if self.counts is None:
            raise ValueError(
                "Results by frequency need training counts. Pass `counts` and `num_documents` to XMCMetrics."
            )
        if not self.documents:
            raise ValueError("There is nothing to compute: no document was added. Call `update` first.")
        true, correct, predicted = self._label_counts()
        bucket_of = np.searchsorted(self.bucket_limits, self._all_counts())
        rows: list[dict[str, Any]] = []
        for bucket, (name, low, high) in enumerate(_bucket_names(self.bucket_limits)):
            inside = bucket_of == bucket
            occurring = inside & (true > 0)
            positives, labels = int(true[inside].sum()), int(occurring.sum())
            row = {"bucket": name, "min_count": low, "max_count": high}
            row.update(labels=int(inside.sum()), true_labels=labels, positives=positives)
            for i, k in enumerate(self.ks):
                hits = int(correct[i, inside].sum())
                row[f"recall@{k}"] = _ratio(hits, positives)
                row[f"precision@{k}"] = _ratio(hits, int(predicted[i, inside].sum()))
                row[f"coverage@{k}"] = _ratio(int((correct[i, occurring] > 0).sum()), labels)
                row[f"contribution@{k}"] = hits / (self.documents * k)
            rows.append(row)
        return rows

    def _grow_labels(self, size: int) -> None:
        """Makes room for labels with ids below `size`."""
        missing = size - len(self._tables["true"])
        if missing > 0:
            for name in ("true", "correct", "predicted"):
                table = self._tables[name]
                self._tables[name] = np.pad(table, [(0, 0)] * (table.ndim - 1) + [(0, missing)])
            if self.counts is not None:
                self._classes = np.pad(self._classes, (0, missing))

    def _grow_documents(self, size: int) -> None:
        """Makes room for documents with fewer than `size` true labels."""
        missing = size - len(self._tables["documents"])
        if missing > 0:
            self._tables["documents"] = np.pad(self._tables["documents"], (0, missing))
            self._tables["hits"] = np.pad(self._tables["hits"], ((0, missing), (0, 0)))

    def _count_batch(self, indices: np.ndarray, indptr: np.ndarray, columns: np.ndarray) -> None:
        """Adds checked documents to the tables."""
        labels = columns[indptr[0] : indptr[-1]].astype(np.int64)
        offsets = indptr.astype(np.int64) - indptr[0]
        positives = np.diff(offsets)
        rows = np.repeat(np.arange(len(indices)), positives)
        filled_rows, filled_places = np.nonzero(indices >= 0)
        filled_labels = indices[filled_rows, filled_places].astype(np.int64)

        # Each (document, label) pair is one number. Those of the truth are sorted, so one search finds all hits.
        width = len(self._tables["true"])
        hit = _isin_sorted(filled_rows * width + filled_labels, rows * width + labels)
        hit_rows, hit_places, hit_labels = filled_rows[hit], filled_places[hit], filled_labels[hit]

        self._grow_documents(int(positives.max()) + 1)
        _add(self._tables["documents"], positives)
        _add(self._tables["hits"], positives[hit_rows], hit_places)
        _add(self._tables["true"], labels)
        _add(self._tables["predicted"], self._first_k[filled_places], filled_labels)
        _add(self._tables["correct"], self._first_k[hit_places], hit_labels)
        if self.hierarchy is not None:
            self._count_with_ancestors(self.hierarchy, indices, rows, labels)
        if self.counts is None:
            return
        self._add_gains("", self._classes[hit_labels], positives[hit_rows], hit_places)
        # The best possible ranking puts the rarest labels first: sorted by document, then by class.
        num_classes = len(self._class_counts)
        ranked = np.sort(rows * num_classes + self._classes[labels])
        places = np.arange(len(ranked)) - offsets[rows]
        kept = places < self.ks[-1]
        self._add_gains("ideal_", ranked[kept] % num_classes, positives[rows[kept]], places[kept])

    def _count_with_ancestors(
        self, hierarchy: Hierarchy, indices: np.ndarray, rows: np.ndarray, labels: np.ndarray
    ) -> None:
        """Adds the sizes of the sets of true labels, of predicted ones and of what they share, with all ancestors."""
        width = max(len(hierarchy), int(indices.max(initial=0)) + 1, int(labels.max(initial=0)) + 1)
        true = _with_ancestors(hierarchy, rows, labels, width)
        self._tables["true_above"] += len(true)
        for i, k in enumerate(self.ks):
            places = np.nonzero(indices[:, :k] >= 0)
            found = _with_ancestors(hierarchy, places[0], indices[places].astype(np.int64), width)
            self._tables["predicted_above"][i] += len(found)
            self._tables["shared_above"][i] += len(np.intersect1d(found, true, assume_unique=True))

    def _add_gains(self, prefix: str, classes: np.ndarray, positives: np.ndarray, places: np.ndarray) -> None:
        """Adds hits, given by the label's class, the document's number of true labels and the rank, to the gains."""
        for i, k in enumerate(self.ks):
            inside = places < k
            cells = classes[inside]
            _add(self._tables[f"{prefix}gain"][i], cells)
            discounts = self._discounts[i][np.minimum(positives[inside], k), places[inside]]
            _add(self._tables[f"{prefix}discounted_gain"][i], cells, amount=discounts)

    def _ranking_metrics(self) -> dict[str, float | None]:
        """Metrics that only need the ranks of the hits."""
        documents, hits = self._tables["documents"], self._tables["hits"]
        positives = np.arange(len(documents))
        with_truth = int(documents[1:].sum())
        discounts = _discounts(self.ks[-1])
        best = np.append(1.0, np.cumsum(discounts))  # without true labels there are no hits: any divisor gives 0
        results: dict[str, float | None] = {}
        for k in self.ks:
            results[f"P@{k}"] = int(hits[:, :k].sum()) / (self.documents * k)
        for k in self.ks:
            gains = (hits[:, :k] * discounts[:k]).sum(axis=1)
            results[f"nDCG@{k}"] = (gains / best[np.minimum(positives, k)]).sum() / self.documents
        for k in self.ks:
            hit_counts = hits[:, :k].sum(axis=1)
            results[f"R@{k}"] = _ratio((hit_counts[1:] / positives[1:]).sum(), with_truth)
        for k in self.ks:
            hit_counts = hits[:, :k].sum(axis=1)
            results[f"RP@{k}"] = _ratio((hit_counts[1:] / np.minimum(positives[1:], k)).sum(), with_truth)
        return results

    def _propensity_metrics(self) -> dict[str, float | None]:
        """Metrics that weight a hit by the inverse propensity of its label."""
        results: dict[str, float | None] = {}
        for metric, table in (("PSP", "gain"), ("PSnDCG", "discounted_gain")):
            for i, k in enumerate(self.ks):
                gain = (self._tables[table][i] * self._weights).sum()
                best = (self._tables[f"ideal_{table}"][i] * self._weights).sum()
                results[f"{metric}@{k}"] = _ratio(gain, best)
        return results

    def _label_metrics(self) -> dict[str, float | None]:
        """Metrics that need the counts of each label."""
        true, correct, predicted = self._label_counts()
        results: dict[str, float | None] = {}
        for i, k in enumerate(self.ks):
            results[f"micro-F1@{k}"] = _ratio(2 * int(correct[i].sum()), int(predicted[i].sum() + true.sum()))
        for i, k in enumerate(self.ks):
            involved = predicted[i] + true
            labels = involved > 0
            results[f"macro-F1@{k}"] = _ratio((2 * correct[i, labels] / involved[labels]).sum(), int(labels.sum()))
        if self.counts is not None:
            tail = (self._all_counts() <= self.tail_max_count) & (true > 0)
            for i, k in enumerate(self.ks):
                results[f"tail-coverage@{k}"] = _ratio(int((correct[i, tail] > 0).sum()), int(tail.sum()))
        return results

    def _hierarchical_metrics(self) -> dict[str, float | None]:
        """Metrics of sets of labels and their ancestors."""
        true, predicted, shared = (self._tables[f"{name}_above"] for name in ("true", "predicted", "shared"))
        sums = {"hP": predicted, "hR": true, "hF1": (predicted + true) / 2}
        return {f"{name}@{k}": _ratio(int(shared[i]), sums[name][i]) for name in sums for i, k in enumerate(self.ks)}

    def _label_counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Per label: true occurrences, and for each k the hits and the predictions."""
        tables = self._tables
        return tables["true"], np.cumsum(tables["correct"], axis=0), np.cumsum(tables["predicted"], axis=0)

    def _all_counts(self) -> np.ndarray:
        """Training count of each label, including unseen ones."""
        return self._class_counts[self._classes]


def _bucket_names(limits: Sequence[int]) -> Iterator[tuple[str, int, int | None]]:
    """Name, smallest and largest training count of each bucket."""
    low = 0
    for high in limits:
        yield (str(low) if low == high else f"{low}-{high}"), low, high
        low = high + 1
    yield f">{limits[-1]}", low, None


def _batches(indices: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(indices), _BATCH):
        yield start, indices[start : start + _BATCH]


def _isin_sorted(values: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """Which values occur in a sorted array."""
    if not len(ordered):
        return np.zeros(values.shape, bool)
    return ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values


def _with_ancestors(hierarchy: Hierarchy, rows: np.ndarray, labels: np.ndarray, width: int) -> np.ndarray:
    """The labels of documents and their ancestors, as unique numbers `row * width + label`."""
    known = labels < len(hierarchy)
    reached = hierarchy.closure[labels[known]]
    pairs = np.repeat(rows[known], np.diff(reached.indptr)) * width + reached.indices
    return np.unique(np.concatenate([pairs, rows[~known] * width + labels[~known]]))


def _add(table: np.ndarray, *cells: np.ndarray, amount: int | np.ndarray = 1) -> None:
    """Adds to cells of a table, which may be repeated. On a flat view, where `np.add.at` is fast."""
    np.add.at(table.reshape(-1), np.ravel_multi_index(cells, table.shape), amount)


def _discounts(k: int) -> np.ndarray:
    return 1 / np.log2(np.arange(2, k + 2))


def _relative_discounts(k: int) -> np.ndarray:
    """Discount of a rank divided by the sum of the first min(k, n): `[min(k, n), rank]`, in integer units."""
    best = np.append(1.0, np.cumsum(_discounts(k)))
    return np.rint(_discounts(k) / best[:, None] / _UNIT).astype(np.int64)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
