"""New, removed and renamed labels of a trained model, without a new training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_matrix, diags
from torch import nn
from torch.nn import functional

from .features import Features
from .knn_ranker import KNNRanker, KNNVectors
from .label_tree import LabelTree
from .label_vectors import LabelVectors, of_columns
from .labels import Labels
from .linear_ranker import LinearRanker, first_node
from .modeling_heads import LevelHead
from .modeling_parts import PartsMixin
from .ranker_editing import NewLabels, with_labels, without_nodes
from .utils import offsets_of
from .vocabulary import LabelEntry

# Scale of the text of a label among the documents of its classifier, as in the training of a ranker.
_TEXT_WEIGHT = np.float32(0.5)
# Length of the vector of a text in place of a missing centroid. A scorer that was fitted without such labels takes the
# two for independent evidence; chosen on validation documents.
_CENTROID_SCALE = np.float32(0.5)
# Clusters that a document of a new label votes for.
_CLUSTERS = 10
# Names of labels that an error or the record of an edit lists.
_LISTED = 5


class _Documents(NamedTuple):
    """
    What is known about new labels: their texts (the first `num_texts`), followed by their examples.

    `features` are of unit length, `labels` are counted from 0.
    """

    features: Features
    labels: np.ndarray
    num_texts: int
    num_labels: int

    def targets(self) -> csr_matrix:
        shape = (len(self.labels), self.num_labels)
        return csr_matrix((np.ones(len(self.labels), np.float32), (np.arange(len(self.labels)), self.labels)), shape)


class LabelEditingMixin(PartsMixin):
    """
    Mixin that adds, removes and renames the labels of a model in memory.

    The class computes features.
    """

    tfidf: Any
    featurize: Any
    prepare_vectors: Any

    def add_labels(
        self,
        labels: Mapping[str, str | LabelEntry | Mapping[str, Any] | None],
        examples: Mapping[str, Sequence[str] | Features] | None = None,
        batch_size: int = 32,
        num_threads: int | None = None,
    ) -> None:
        """
        Adds labels to the model, from their texts and from a few examples where given.

        A new label becomes a leaf of the label tree where the ranker would look for its text and its examples. Its
        classifier is trained on these, against the words (and directions of document vectors) that have positive
        weights in the other classifiers of the cluster. The classifiers of all other labels stay as they are. Save the
        model with `save_pretrained`.

        Args:
            labels (`Mapping` or [`LabelVocabulary`]):
                For each new label its text or entry, as in [`LabelVocabulary`]. The text may be empty if the label
                itself consists of words, or if it has examples.
            examples (`Mapping[str, Sequence[str]]`, *optional*):
                Texts of documents of new labels, or their features: vectors for a model that was trained on vectors.
            batch_size (`int`, *optional*, defaults to 32):
                Batch size of the encoder.
            num_threads (`int`, *optional*):
                Number of threads; all cores by default.

        Example:

        ```python
        model.add_labels({"heat pumps": "heat pumps; ground source heating"}, {"heat pumps": ["Heat pumps in homes"]})
        ```
        """
        old, tree = self._labels_and_tree()
        ranker, has_head = self.ranker, tree.depth in (self.config.head_levels or ())
        if ranker is None or (has_head and type(self.heads[-1]) is not LevelHead):
            raise ValueError(
                "Labels cannot be added to models without ranker, or with bottleneck or adaptive heads: these learn "
                "labels with the encoder. Train the model again with the new labels, or use another method."
            )
        if not isinstance(ranker, LinearRanker):
            raise ValueError(
                "Labels cannot be added to a model of the method `knn`: it predicts labels of training documents. "
                "Train it again with documents of the new labels, or use another method."
            )
        names = _checked_new(old, labels)
        new = old.followed_by(labels)
        documents = self._documents(new, names, examples or {}, batch_size, num_threads)
        counts = np.bincount(documents.labels[documents.num_texts :], minlength=len(names))
        new.counts[len(old) :] = counts
        new.num_documents += int(counts.sum())
        clusters = self._clusters(ranker, documents, num_threads)
        ranker_tree = ranker.tree.with_labels(clusters)
        new_tree = ranker_tree
        if ranker.tree != tree:
            new_tree = tree.with_labels(self._clusters_of_nearest(tree, documents, num_threads))
        weights = np.where(np.arange(len(documents.labels)) < documents.num_texts, _TEXT_WEIGHT, np.float32(1))
        own = _scaled(self.ranker_features(documents.features), weights)
        vectors, scale = self.label_vectors, 1.0 if self.encoder is None else self.config.embedding_scale
        centroids = None if vectors is None else vectors.dense.get("centroid_vector")
        ranker = with_labels(ranker, ranker_tree, NewLabels(clusters, own, documents.targets(), centroids, scale))
        if vectors is not None:
            vectors = vectors.followed_by(_label_vectors(documents, vectors.columns))
        if has_head:
            _add_rows(self.heads[-1], tree, new_tree, documents)
        new.edits.append(_edit("added", names, int(counts.sum())))
        self._replace(new, new_tree, ranker, vectors)

    def remove_labels(self, labels: Sequence[str]) -> None:
        """
        Removes labels from the model.

        All other labels keep their scores. Clusters without labels are removed from the label tree. In the hierarchy,
        the parents of a removed label take its place.

        Args:
            labels (`Sequence[str]`): The labels to remove, not all.
        """
        old, tree = self._labels_and_tree()
        if self.config.head_tails is not None:
            raise ValueError(
                "Labels cannot be removed from a model with an adaptive head: the size of its layers depends on the "
                "number of labels. Train it again, or pass `exclude` when you predict."
            )
        removed = _checked_ids(old, labels, "labels")
        if len(removed) == len(old):
            raise ValueError("`labels` are all labels of the model. At least one must be left.")
        is_left = np.ones(len(old), dtype=np.bool_)
        is_left[removed] = False
        new_tree, nodes = tree.without_labels(removed)
        ranker, vectors = self.ranker, self.label_vectors
        if isinstance(ranker, LinearRanker):
            own = (new_tree, nodes) if ranker.tree == tree else ranker.tree.without_labels(removed)
            ranker = without_nodes(ranker, *own)
        elif ranker is not None:
            ranker = _voters(ranker, new_tree, is_left)
        new = old.subset(np.flatnonzero(is_left))
        new.edits.append(_edit("removed", [old[i] for i in removed]))
        for level, head in zip(self.config.head_levels or (), self.heads, strict=True):
            _keep_rows(head, nodes[first_node(tree, level) : first_node(tree, level + 1)])
        self._replace(new, new_tree, ranker, None if vectors is None else vectors.without(is_left), is_left)

    def rename_labels(self, names: Mapping[str, str]) -> None:
        """
        Renames labels; nothing else changes.

        Args:
            names (`Mapping[str, str]`): The new label for each old one.
        """
        old, _ = self._labels_and_tree()
        if not isinstance(names, Mapping):
            raise TypeError(f"`names` must be a dictionary from old to new labels, not {type(names).__name__}.")
        renamed = list(old.names)
        for place, new in zip(_checked_ids(old, list(names), "names"), names.values(), strict=True):
            if not isinstance(new, str) or not new:
                raise ValueError(f"The new label of {old[place]!r:.80} is {new!r:.80}. It must be a non-empty text.")
            renamed[place] = new
        counts = Counter(renamed)
        if taken := [new for new in names.values() if counts[new] > 1]:
            raise ValueError(f"`names` has the new label {taken[0]!r:.80}, which is that of another label as well.")
        self.labels = old.renamed(renamed)
        self.labels.edits.append(_edit("renamed", [f"{label} → {new}" for label, new in names.items()]))

    def _labels_and_tree(self) -> tuple[Labels, LabelTree]:
        """Returns labels and tree; raises if there are none."""
        if self.labels is None or self.label_tree is None:
            raise ValueError("The model has no labels. Train it with `XMCTrainer`, or load a trained one.")
        return self.labels, self.label_tree

    def _documents(
        self, new: Labels, names: list[str], examples: Mapping[str, Any], batch_size: int, num_threads: int | None
    ) -> _Documents:
        """Computes the features of the texts and examples of the last labels of `new`."""
        known = {name: i for i, name in enumerate(names)}
        _check_examples(examples, known)
        reads_text = self.tfidf is not None or self.encoder is not None
        readable = new.readable_texts()[-len(names) :] if reads_text else [""] * len(names)
        owners = [i for i, text in enumerate(readable) if text]
        texts, num_texts = [readable[i] for i in owners], len(owners)
        vectors = []
        for name, rows in examples.items():
            if isinstance(rows, Features):
                vectors.append((known[name], rows))
            else:
                texts.extend(rows)
                owners.extend([known[name]] * len(rows))
        parts = [self.featurize(texts, num_threads, batch_size)] if texts else []
        for label, rows in vectors:
            parts.append(rows if reads_text else self.prepare_vectors(rows))
            owners.extend([label] * len(rows))
        features = reduce(Features.followed_by, parts) if parts else None
        used = np.zeros(0, np.int64) if features is None else np.flatnonzero(_are_known(features))
        labels = np.array(owners, dtype=np.int64)[used]
        if missing := [names[i] for i in np.setdiff1d(np.arange(len(names)), labels)]:
            reason = "neither a text nor examples" if not reads_text else "no text or example with words that it knows"
            raise ValueError(
                f"The model has {reason} for {len(missing)} of the new labels: {_listed(missing)}. Pass "
                "their texts in words (codes are not), or `examples`."
            )
        assert features is not None
        return _Documents(features[used], labels, int((used < num_texts).sum()), len(names))

    def _clusters(self, ranker: LinearRanker, documents: _Documents, num_threads: int | None) -> np.ndarray:
        """Returns the cluster of each new label, where the ranker finds its documents."""
        tree, level = ranker.tree, ranker.tree.depth - 1
        if level == 0:
            return np.zeros(documents.num_labels, np.int64)
        beam, features = None, documents.features
        if ranker.first_level > 1:
            vectors = torch.from_numpy(features.dense).to(self.device)
            beam = self.match(vectors, ranker.first_level - 1, ranker.beam_size)
        if beam is not None and beam.level == level:
            nodes, scores = beam.nodes, beam.log_probabilities
        else:
            found = min(_CLUSTERS, tree.level_sizes[level - 1])
            scores, nodes = ranker.search(
                self.ranker_features(features), level, found, ranker.beam_size, True, num_threads, beam
            )
            nodes = np.where(nodes >= 0, nodes - first_node(tree, level), -1)
        rows, places = np.nonzero(nodes >= 0)
        shape = (documents.num_labels, tree.level_sizes[level - 1])
        votes = csr_matrix((np.exp(scores[rows, places]), (documents.labels[rows], nodes[rows, places])), shape=shape)
        return np.asarray(votes.argmax(axis=1)).ravel().astype(np.int64)

    def _clusters_of_nearest(self, tree: LabelTree, documents: _Documents, num_threads: int | None) -> np.ndarray:
        """Returns the cluster, in another tree than that of the ranker, of the label nearest to each new label."""
        logits, labels = self._search_ranker("logits", documents.features, 1, None, num_threads)
        order = np.lexsort((-logits[:, 0], documents.labels))
        _, first = np.unique(documents.labels[order], return_index=True)
        return tree.parents(tree.depth)[tree.leaf_positions[labels[order[first], 0]]]

    def _replace(
        self,
        labels: Labels,
        tree: LabelTree,
        ranker: LinearRanker | KNNRanker | None,
        label_vectors: LabelVectors | None,
        is_left: np.ndarray | None = None,
    ) -> None:
        """Takes over new parts; with `is_left`, other labels are removed from the lists of similar documents."""
        knn, knn_vectors = self.knn, self.knn_vectors
        self.labels, self.label_tree, self.ranker, self.label_vectors = labels, tree, ranker, label_vectors
        self.config.level_sizes = tree.level_sizes
        self.knn = None if knn is None else _voters(knn, tree, is_left)
        if knn_vectors is not None:
            lists = _lists(knn_vectors.label_begin, knn_vectors.labels, is_left)
            self.knn_vectors = KNNVectors(knn_vectors.vectors, *lists, len(labels))


def _checked_new(old: Labels, labels: Any) -> list[str]:
    """Returns the names of new labels."""
    if not isinstance(labels, Mapping) or not all(isinstance(name, str) for name in labels):
        raise TypeError("`labels` must be a dictionary from new labels to their texts, or a `LabelVocabulary`.")
    if not labels:
        raise ValueError("`labels` is empty. Pass at least one new label.")
    known = [name for name, place in zip(labels, old.ids(labels), strict=True) if place >= 0]
    if known:
        raise ValueError(
            f"{len(known)} of `labels` are labels of the model already: {_listed(known)}. Leave them out."
        )
    return list(labels)


def _checked_ids(old: Labels, labels: Any, argument: str) -> np.ndarray:
    """Returns the ids of labels of the model."""
    if isinstance(labels, str) or not all(isinstance(name, str) for name in labels):
        raise TypeError(f"`{argument}` must be a list of labels, not {labels!r:.80}.")
    labels = list(labels)
    if not labels:
        raise ValueError(f"`{argument}` is empty. Pass at least one label.")
    twice = [name for name, count in Counter(labels).items() if count > 1]
    if twice:
        raise ValueError(f"`{argument}` has the label {twice[0]!r:.80} twice. Drop one.")
    ids = old.ids(labels)
    if unknown := [name for name, place in zip(labels, ids, strict=True) if place < 0]:
        raise ValueError(f"{len(unknown)} of `{argument}` are not labels of the model: {_listed(unknown)}.")
    return ids


def _check_examples(examples: Any, known: Mapping[str, int]) -> None:
    if not isinstance(examples, Mapping):
        raise TypeError(f"`examples` must be a dictionary from labels to texts, not {type(examples).__name__}.")
    for name, rows in examples.items():
        if name not in known:
            raise ValueError(f"`examples` has the label {name!r:.80}, which is not one of the new labels.")
        if not isinstance(rows, Features) and (isinstance(rows, str) or not all(isinstance(row, str) for row in rows)):
            raise TypeError(f"`examples[{name!r:.80}]` must be a list of texts, or `Features`, not {rows!r:.80}.")


def _are_known(features: Features) -> np.ndarray:
    """Marks the rows with any feature."""
    known = np.zeros(len(features), dtype=np.bool_)
    if features.sparse is not None:
        known |= np.diff(features.sparse.indptr) > 0
    if features.dense is not None:
        known |= features.dense.any(axis=1)
    return known


def _scaled(features: Features, weights: np.ndarray) -> Features:
    """Rows multiplied by their weights."""
    sparse = None if features.sparse is None else csr_matrix(diags(weights) @ features.sparse)
    return Features(sparse, None if features.dense is None else features.dense * weights[:, None])


def _label_vectors(documents: _Documents, columns: np.ndarray | None) -> LabelVectors:
    """The vectors of new labels."""
    features, is_text = of_columns(documents.features, columns), np.arange(len(documents.labels)) < documents.num_texts
    kinds = []
    for used in (is_text, ~is_text):
        by_label = csr_matrix(documents.targets().T @ diags(used.astype(np.float32)))
        sparse = None if features.sparse is None else csr_matrix(by_label @ features.sparse)
        kinds.append(Features(sparse, None if features.dense is None else by_label @ features.dense).normalized())
    texts, centroids = kinds
    filled = _scaled(texts, np.where(_are_known(centroids), np.float32(0), _CENTROID_SCALE))
    sparse, dense = centroids.sparse, centroids.dense
    if sparse is not None and filled.sparse is not None:
        sparse = csr_matrix(sparse + filled.sparse)
    if dense is not None and filled.dense is not None:
        dense = dense + filled.dense
    return LabelVectors.from_features(texts, Features(sparse, dense), columns)


def _add_rows(head: LevelHead, old: LabelTree, new: LabelTree, documents: _Documents) -> None:
    """Adds rows of new labels to a head: the mean vector of their documents, as long as the other rows usually are."""
    assert documents.features.dense is not None
    sums = torch.from_numpy(documents.targets().T @ documents.features.dense).to(head.weight)
    rows, count = functional.normalize(sums) * head.weight.norm(dim=1).median(), len(sums)
    order = torch.from_numpy(np.concatenate([old.leaf_positions, old.num_labels + np.arange(count)])[new.leaf_labels])
    order = order.to(head.weight.device)
    weight = torch.cat([head.weight, rows])[order]
    bias = torch.cat([head.bias, head.bias.median().expand(count)])[order]
    head.weight, head.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    head.num_nodes = len(weight)


def _keep_rows(head: LevelHead, is_left: np.ndarray) -> None:
    """Drops rows of a head."""
    marks = torch.from_numpy(is_left).to(head.weight.device)
    for name in ("weight", "bias"):
        setattr(head, name, nn.Parameter(getattr(head, name).detach()[marks]))
    head.num_nodes = len(head.weight)


def _lists(begin: np.ndarray, labels: np.ndarray, is_left: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The labels of documents without those that are removed."""
    if is_left is None:
        return begin, labels
    kept = is_left[labels]
    ends = offsets_of(kept)[begin]
    return ends, (np.cumsum(is_left) - 1)[labels[kept]].astype(np.int32)


def _voters(knn: KNNRanker, tree: LabelTree, is_left: np.ndarray | None) -> KNNRanker:
    """The index of similar documents for other labels."""
    begin, labels = _lists(knn.index.label_begin, knn.index.labels, is_left)
    return KNNRanker(tree, replace(knn.index, label_begin=begin, labels=labels), count=knn.count, power=knn.power)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{name!r:.80}" for name in names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


def _edit(action: str, names: Sequence[str], examples: int = 0) -> dict[str, Any]:
    """What the label file and the card say about an edit."""
    edit = {"date": datetime.now(timezone.utc).date().isoformat(), "action": action, "count": len(names)}
    return {**edit, **({"examples": examples} if examples else {}), "labels": list(names[:_LISTED])}
