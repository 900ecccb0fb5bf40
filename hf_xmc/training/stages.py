"""
The stages of a training, in order.

Linear methods run [`LINEAR_STAGES`]. Methods with an encoder run [`PREPARATION`], then fine-tune level by level
(`levels.py`: shortlist, bootstrap, training steps), then run [`COMPLETION`].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import Dataset
from scipy.sparse import csr_matrix, vstack

from ..data import feature_matrix
from ..features import Features
from ..inference.predict import map_batches
from ..knn_ranker import KNNRanker
from ..label_tree import LabelTree
from ..labels import Labels
from ..linear_ranker import Beam, LinearRanker
from ..parallel.stage_cache import Runtime
from ..scorer import KNN_PARTS, default_scorer
from ..serialization import load_tensors, save_tensors
from ..tfidf import TfidfFeaturizer
from .bootstrap import match_documents
from .clustering import build_tree, frequency_tree
from .context import RunContext
from .embedding import tokenize_dataset
from .label_features import TEXT_LABEL_FEATURES, describe_labels, label_documents
from .options import TreeArguments
from .parts import index_documents, index_vectors, make_label_vectors, word_columns
from .ranker import train_ranker
from .scoring import MIN_DOCUMENTS, fit_scorer, gain_of_parts, join_candidates, score_candidates

_MATRIX_FILE = "matrix.safetensors"
# Documents whose vectors are looked at.
_NUM_SAMPLED = 10_000
# Similar documents on trial must raise nDCG@5 by this much, and by two standard errors.
_LEAST_GAIN = 0.002

Stage = Callable[[RunContext], None]


def encode_labels(context: RunContext) -> None:
    """Collects the labels, unless the model has them, and encodes those of the documents."""
    model, dataset = context.model, context.dataset
    with context.stage("labels") as metrics:
        if model.labels is None:
            vocabulary, with_unseen = context.label_texts or None, not context.labels_seen_only
            model.labels = Labels.from_dataset(dataset, texts=vocabulary, unseen=with_unseen)
        context.targets = model.labels.encode(dataset)
        metrics.update(documents=len(dataset), labels=len(model.labels))
        if unseen := int((model.labels.counts == 0).sum()):
            metrics.update(without_documents=unseen)


def make_features(context: RunContext) -> None:
    """Computes the sparse features of the documents; fits TF-IDF on texts, unless the model has it."""
    model, args, dataset = context.model, context.args, context.dataset
    with context.stage("features") as metrics:
        has_text, has_vectors = "text" in dataset.column_names, "feature_ids" in dataset.column_names
        kind = args.features or ("text" if has_text else "vectors")
        if kind == "vectors" and model.encoder is not None and has_text:
            raise ValueError("`features='vectors'` needs a linear method: beside an encoder the ranker reads TF-IDF.")
        if not (has_text if kind == "text" else has_vectors):
            raise ValueError(f"`features={kind!r}`, but the training data has only {', '.join(dataset.column_names)}.")
        if kind == "vectors":
            width = None if context.kept is None else context.kept.ranker.num_sparse
            vectors = feature_matrix(dataset, width)
            if context.kept is None:
                model.config.vector_power = args.feature_power or _default_power(vectors)
            context.features = model.prepare_vectors(Features(vectors))
            metrics.update(power=model.config.vector_power)
        else:
            model.tfidf, matrix = context.runtime.cache.once(
                "tf-idf", lambda: _fit_tfidf(context), _save_tfidf, _load_tfidf
            )
            context.features = Features(matrix)
        metrics.update(features=context.features.num_sparse)


def _default_power(vectors: csr_matrix) -> float:
    """Damps raw counts, whose rows have any length. Rows of length 1 have been weighted already."""
    squares = vectors[:_NUM_SAMPLED].power(2).sum(axis=1)
    return 1.0 if np.allclose(squares[squares > 0], 1, atol=0.05) else 0.75


def _fit_tfidf(context: RunContext) -> tuple[TfidfFeaturizer, csr_matrix]:
    runtime, texts = context.runtime, context.dataset["text"]
    tfidf = context.model.tfidf
    if tfidf is None:
        tfidf = context.args.make_tfidf(texts)
        # Otherwise, words that only the text of a label has would not be terms.
        more = _unseen_label_texts(context)
        tfidf.fit(CountedTexts(texts, "tf-idf: fit", runtime, more), num_threads=runtime.num_threads)
    counted = CountedTexts(texts, "tf-idf: transform", runtime)
    return tfidf, tfidf.transform(counted, num_threads=runtime.num_threads)


def _unseen_label_texts(context: RunContext) -> list[str]:
    """Texts of labels without documents."""
    labels = context.model.labels
    if labels is None or labels.counts.all():
        return []
    texts = zip(labels.readable_texts(), labels.counts, strict=True)
    return [text for text, count in texts if text and not count]


def _save_tfidf(result: tuple[TfidfFeaturizer, csr_matrix], folder: str) -> None:
    tfidf, matrix = result
    tfidf.save_pretrained(folder)
    arrays = {"indptr": matrix.indptr, "indices": matrix.indices, "data": matrix.data}
    save_tensors(os.path.join(folder, _MATRIX_FILE), arrays, "sparse matrix")


def _load_tfidf(folder: str) -> tuple[TfidfFeaturizer, csr_matrix]:
    tfidf = TfidfFeaturizer.from_pretrained(folder)
    arrays, _ = load_tensors(os.path.join(folder, _MATRIX_FILE), "sparse matrix")
    shape = (len(arrays["indptr"]) - 1, tfidf.num_features)
    # The constructor of a filled matrix would read and copy the memory-mapped arrays.
    matrix = csr_matrix(shape, dtype=arrays["data"].dtype)
    matrix.data, matrix.indices, matrix.indptr = arrays["data"], arrays["indices"], arrays["indptr"]
    return tfidf, matrix


def tokenize(context: RunContext) -> None:
    """Tokenises the documents."""
    with context.stage("tokens") as metrics:
        metrics.update(max_length=context.model.config.max_length)

        def make() -> Dataset:
            return tokenize_dataset(context.model, context.dataset)

        context.tokens = context.runtime.cache.once("tokens", make, Dataset.save_to_disk, Dataset.load_from_disk)


def make_tree(context: RunContext) -> None:
    """Builds the label tree, unless the model has one."""
    model, targets = context.model, context.targets
    features = context.features
    if context.args.label_features == "embedding" and model.label_tree is None:
        features = Features(None, context.vectors())
    with context.stage("tree") as metrics:
        if model.label_tree is None:
            model.label_tree = _build_tree(context, features, context.args.make_tree_arguments())
        elif model.label_tree.num_labels != targets.shape[1]:
            raise ValueError(
                f"The label tree has {model.label_tree.num_labels} labels, the training data {targets.shape[1]}. "
                "Build the tree from these labels, or leave it out."
            )
        metrics.update(depth=model.label_tree.depth)


def _build_tree(context: RunContext, features: Features, arguments: TreeArguments) -> LabelTree:
    model, targets, runtime = context.model, context.targets, context.runtime
    if arguments.clustering == "flat":
        return LabelTree.flat(targets.shape[1])
    if arguments.clustering == "hierarchy":
        return LabelTree.from_hierarchy(model.checked_labels().checked_hierarchy())
    if arguments.clustering == "frequency":
        counts = np.bincount(targets.indices, minlength=targets.shape[1])
        return frequency_tree(counts, arguments.shares, arguments.shares_of)

    if context.args.label_features in TEXT_LABEL_FEATURES:
        context.text_uses["label tree"] = None

    def build() -> LabelTree:
        label_features = describe_labels(model, features, targets, context.args.label_features, runtime.num_threads)
        return build_tree(label_features, arguments, runtime)

    return runtime.cache.once("label tree", build, LabelTree.save_pretrained, LabelTree.from_pretrained)


def train_predictors(context: RunContext) -> None:
    """Trains what predicts after fine-tuning: the ranker and, with `predict_with="all"`, all parts and the scorer."""
    model, args = context.model, context.args
    model.config.predict_with = str(args.predict_with)
    if args.predict_with == "heads":
        return
    features = context.features
    if model.encoder is not None:
        model.config.embedding_scale = args.embedding_scale
        features = Features(context.features.sparse, context.vectors())
    tree = _ranker_tree(context, features)
    model.scorer = context.scorer
    if args.predict_with != "all":
        _train_ranker(context, features, context.targets, tree, _match(context))
    elif context.scorer is not None:
        _train_parts(context, features, context.targets, tree, _match(context))
    elif context.validation is not None:
        _train_parts(context, features, context.targets, tree, _match(context))
        truth = model.checked_labels().encode(context.validation)
        _fit_scorer(context, _validation_candidates(context, context.validation), truth, context.targets)
    else:
        held_out = context.held_out()
        if len(held_out):
            rest = np.setdiff1d(np.arange(len(features)), held_out)
            runtime, cache = context.runtime, context.runtime.cache.within("held out")
            context.runtime = replace(runtime, cache=cache)
            beam = _match(context)
            _train_parts(context, features[rest], context.targets[rest], tree, None if beam is None else beam[rest])
            context.runtime = runtime
            candidates = score_candidates(model, features[held_out], model.available_parts, runtime.num_threads)
            _fit_scorer(context, [candidates], context.targets[held_out], context.targets[rest])
        _train_parts(context, features, context.targets, tree, _match(context))
        if model.scorer is None:
            model.scorer = default_scorer(model.available_parts)


def _ranker_tree(context: RunContext, features: Features) -> LabelTree:
    """Returns the tree of the ranker: that of the model, or a new one from the features of the ranker."""
    model, args = context.model, context.args
    assert model.label_tree is not None
    if context.kept is not None:
        return context.kept.ranker.tree
    shape = args.make_tree_arguments()
    if model.encoder is None or not (args.refine_tree or shape.clustering == "frequency"):
        return model.label_tree
    # Labels of a tail cluster are alike only in being rare, so the ranker gets a tree by features.
    if shape.clustering == "frequency":
        shape = replace(shape, clustering="balanced")
    with context.stage("refined tree"):
        return _build_tree(context, model.ranker_features(features), shape)


def _train_parts(
    context: RunContext, features: Features, targets: csr_matrix, tree: LabelTree, initial_beam: Beam | None
) -> None:
    """Trains the ranker, and makes label vectors and the indices of similar documents."""
    model, args = context.model, context.args
    assert model.label_tree is not None
    _train_ranker(context, features, targets, tree, initial_beam)
    with context.stage("label vectors") as metrics:
        texts, columns = context.text_features("label vectors"), word_columns(model.tfidf)
        model.label_vectors = make_label_vectors(features, targets, texts, columns, context.runtime.num_threads)
        metrics.update(label_vector_bytes=model.label_vectors.num_bytes)
    if _uses_similar_documents(context):
        with context.stage("similar documents") as metrics:
            if features.sparse is not None:
                arguments = args.make_knn_arguments()
                model.knn = index_documents(Features(features.sparse), targets, model.label_tree, arguments)
                metrics.update(knn_bytes=model.knn.num_bytes)
            if features.dense is not None:
                model.knn_vectors = index_vectors(features.dense, targets)


def _validation_candidates(context: RunContext, validation: Dataset) -> Iterator[Mapping[str, np.ndarray]]:
    """Yields the scores of the parts for the candidates of the validation documents."""
    model, runtime = context.model, context.runtime

    def score(features: Features) -> dict[str, np.ndarray]:
        return score_candidates(model, features, model.available_parts, runtime.num_threads)

    batch_size = context.args.per_device_eval_batch_size
    yield from map_batches(model, validation, score, batch_size=batch_size, runtime=runtime)


def _uses_similar_documents(context: RunContext) -> bool:
    """Whether similar documents are a part. With `None` they are on trial until a scorer has kept them or not."""
    wanted, scorer = context.args.similar_documents, context.model.scorer
    if wanted is not None:
        return wanted
    if scorer is not None:
        return bool(set(scorer.parts) & set(KNN_PARTS))
    return len(context.held_out()) > 0 or len(context.validation or ()) >= MIN_DOCUMENTS


def _fit_scorer(
    context: RunContext, chunks: Iterable[Mapping[str, np.ndarray]], truth: csr_matrix, trained_on: csr_matrix
) -> None:
    """Fits the scorer; `trained_on` has the labels of the documents that trained the parts."""
    model = context.model
    log_counts = np.log1p(np.bincount(trained_on.indices, minlength=trained_on.shape[1])).astype(np.float32)
    with context.stage("last scorer") as metrics:
        metrics.update(documents=truth.shape[0])
        names, candidates = model.available_parts, join_candidates(chunks)
        if set(names) & set(KNN_PARTS) and context.args.similar_documents is None:
            gain, error = gain_of_parts(KNN_PARTS, names, candidates, truth, log_counts)
            metrics.update(points_by_similar_documents=round(100 * gain, 2))
            if gain < max(_LEAST_GAIN, 2 * error):
                model.knn = model.knn_vectors = None
                kept = [name not in KNN_PARTS for name in names]
                candidates.update({view: candidates[view][:, kept] for view in ("scores", "differences")})
        model.scorer = fit_scorer(model.available_parts, [candidates], truth, log_counts)


def _match(context: RunContext) -> Beam | None:
    """Returns the nodes that the heads predict above the labels, if the heads are the ranker's matcher."""
    model, arguments = context.model, context.args.make_ranker_arguments()
    assert model.label_tree is not None
    above = [level for level in model.config.head_levels or () if level < model.label_tree.depth]
    if arguments.matcher != "heads" or not above:
        return None
    vectors = context.vectors()
    with context.stage("match"):
        return match_documents(model, vectors, above[-1], arguments.train_beam_size, context.runtime)


def _train_ranker(
    context: RunContext, features: Features, targets: csr_matrix, tree: LabelTree, initial_beam: Beam | None
) -> None:
    """Trains the ranker on a tree; label texts are further documents if weighted."""
    model, args = context.model, context.args
    ranker: LinearRanker | KNNRanker
    features = model.ranker_features(features)
    with context.stage("ranker") as metrics:
        texts = context.text_features("ranker") if args.label_text_weight and initial_beam is None else None
        if texts is not None:
            documents, labels = label_documents(model.ranker_features(texts), float(args.label_text_weight or 0))
            features, targets = features.followed_by(documents), csr_matrix(vstack([targets, labels], format="csr"))
            metrics.update(label_documents=len(documents))
        if args.uses_knn:
            ranker = index_documents(features, targets, tree, args.make_knn_arguments())
        else:
            options = args.make_ranker_arguments(), context.runtime
            ranker = train_ranker(features, targets, tree, *options, initial_beam, context.kept)
        model.ranker = ranker
        metrics.update(ranker_bytes=ranker.num_bytes)


class CountedTexts(Sequence):
    """
    Texts, a list or the column of a dataset, that report how many of them have been read; `more` texts follow.
    """

    def __init__(self, texts: Sequence[str], stage: str, runtime: Runtime, more: Sequence[str] = ()) -> None:
        self._texts, self._stage, self._runtime, self._more = texts, stage, runtime, more

    def __len__(self) -> int:
        return len(self._texts) + len(self._more)

    def __getitem__(self, rows: Any) -> Any:
        count = len(self._texts)
        if not isinstance(rows, slice):
            return self._texts[rows] if rows < count else self._more[rows - count]
        first, last, _ = rows.indices(len(self))
        self._runtime.report(self._stage, last, len(self))
        if last <= count:
            return self._texts[rows]
        return [*self._texts[first:count], *self._more[max(first - count, 0) : last - count]]


LINEAR_STAGES: tuple[Stage, ...] = (encode_labels, make_features, make_tree, train_predictors)
PREPARATION: tuple[Stage, ...] = (encode_labels, make_features, tokenize, make_tree)
COMPLETION: tuple[Stage, ...] = (train_predictors,)
