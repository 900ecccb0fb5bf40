"""Trains a linear tagger: labels, features, tree, ranker."""

from __future__ import annotations

import os

import numpy as np
from datasets import Dataset
from scipy.sparse import csr_matrix, vstack

from ..data import feature_matrix
from ..features import Features
from ..knn_ranker import KNNRanker
from ..label_tree import LabelTree
from ..labels import Labels
from ..linear_ranker import Beam, LinearRanker
from ..modeling_xmc import XMCForTextClassification
from ..serialization import load_tensors, save_tensors
from ..tfidf import TfidfFeaturizer
from .arguments import XMCTrainingArguments
from .clustering import build_tree, frequency_tree
from .knn import index_documents
from .label_features import check_label_texts, describe_labels, label_documents
from .options import TreeArguments
from .progress import CountedTexts, StageTimer
from .ranker import train_ranker

_MATRIX_FILE = "matrix.safetensors"
# Largest entries that are kept of the PIFA vector of a label.
_LABEL_MAX_FEATURES = 1024


def train_linear(
    model: XMCForTextClassification,
    dataset: Dataset,
    args: XMCTrainingArguments,
    stages: StageTimer,
    label_texts: dict[str, str] | None = None,
) -> None:
    """
    Adds what the model lacks, in the order labels, TF-IDF, tree, ranker. What it has already is used as it is.

    Args:
        model ([`XMCForTextClassification`]):
            A model without a ranker.
        dataset (`datasets.Dataset`):
            Training documents in the columns of [`prepare_dataset`].
        args ([`XMCTrainingArguments`]):
            Options.
        stages ([`StageTimer`]):
            Times and logs the stages.
        label_texts (`dict[str, str]`, *optional*):
            Text by label name.
    """
    features, targets = prepare_features(model, dataset, args, stages, label_texts)
    prepare_tree(model, features, targets, args, stages)
    add_ranker(model, features, targets, args, stages)


def prepare_features(
    model: XMCForTextClassification,
    dataset: Dataset,
    args: XMCTrainingArguments,
    stages: StageTimer,
    label_texts: dict[str, str] | None = None,
) -> tuple[Features, csr_matrix]:
    """
    Adds labels and TF-IDF to a model that lacks them.

    Returns:
        `tuple[Features, csr_matrix]`: sparse features and labels of the training documents.
    """
    with stages.stage("labels") as facts:
        if model.labels is None:
            model.labels = Labels.from_dataset(dataset, texts=label_texts)
        targets = model.labels.encode(dataset)
        facts.update(documents=len(dataset), labels=len(model.labels))
    with stages.stage("features") as facts:
        features = training_features(model, dataset, args, stages)
        facts.update(features=features.num_sparse)
    if args.label_text_weight:
        # It comes last, and what it needs is known now.
        check_label_texts(model, "label_text_weight", args.label_text_weight)
    return features, targets


def prepare_tree(
    model: XMCForTextClassification,
    features: Features,
    targets: csr_matrix,
    args: XMCTrainingArguments,
    stages: StageTimer,
) -> None:
    """Adds a tree to a model that lacks one: that of documents with these features."""
    with stages.stage("tree") as facts:
        if model.label_tree is None:
            model.label_tree = build_label_tree(model, features, targets, args, stages)
        elif model.label_tree.num_labels != targets.shape[1]:
            raise ValueError(
                f"The given label tree has {model.label_tree.num_labels} labels, but there are {targets.shape[1]} in "
                "the training data. Build the tree from these labels, or leave it out."
            )
        facts.update(depth=model.label_tree.depth)


def add_ranker(
    model: XMCForTextClassification,
    features: Features,
    targets: csr_matrix,
    args: XMCTrainingArguments,
    stages: StageTimer,
    tree: LabelTree | None = None,
    start: Beam | None = None,
) -> None:
    """
    Trains the ranker on a tree, the model's own by default, or on its levels below `start`.

    The labels' own texts are documents, too, where the options give them a length.
    """
    tree = model.label_tree if tree is None else tree
    assert tree is not None
    ranker: LinearRanker | KNNRanker
    with stages.stage("ranker") as facts:
        if args.label_text_weight:
            texts, own_labels = label_documents(model, args.label_text_weight, args.num_threads)
            features, targets = features.followed_by(texts), csr_matrix(vstack([targets, own_labels], format="csr"))
            facts.update(label_documents=len(texts))
        if args.uses_knn:
            ranker = index_documents(features, targets, tree, args.make_knn_arguments())
        else:
            ranker = train_ranker(
                features, targets, tree, args.make_ranker_arguments(), args.num_threads, stages.report, start,
                stages.work,
            )  # fmt: skip
        model.ranker = ranker
        facts.update(ranker_bytes=ranker.num_bytes)


def training_features(
    model: XMCForTextClassification, dataset: Dataset, args: XMCTrainingArguments, stages: StageTimer
) -> Features:
    """Features of the training documents; fits the model's TF-IDF where texts are used and it has none yet."""
    has_text, has_vectors = "text" in dataset.column_names, "feature_ids" in dataset.column_names
    kind = args.features or ("text" if has_text else "vectors")
    if kind == "vectors" and model.encoder is not None and has_text:
        raise ValueError("`features='vectors'` goes with linear methods: beside an encoder the ranker reads TF-IDF.")
    if not (has_text if kind == "text" else has_vectors):
        raise ValueError(f"`features={kind!r}`, but the training data has only {', '.join(dataset.column_names)}.")
    if kind == "vectors":
        model.config.vector_power = args.feature_power
        return model.prepare_vectors(Features(feature_matrix(dataset)))
    texts = dataset["text"]

    def make() -> tuple[TfidfFeaturizer, csr_matrix]:
        tfidf = model.tfidf
        if tfidf is None:
            tfidf = args.make_tfidf()
            tfidf.fit(CountedTexts(texts, "tf-idf: fit", stages.report), num_threads=args.num_threads)
        counted = CountedTexts(texts, "tf-idf: transform", stages.report)
        return tfidf, tfidf.transform(counted, num_threads=args.num_threads)

    model.tfidf, matrix = stages.work.once("tf-idf", make, _save_tfidf, _load_tfidf)
    return Features(matrix)


def _save_tfidf(made: tuple[TfidfFeaturizer, csr_matrix], folder: str) -> None:
    tfidf, matrix = made
    tfidf.save_pretrained(folder)
    arrays = {"indptr": matrix.indptr, "indices": matrix.indices, "data": matrix.data}
    save_tensors(os.path.join(folder, _MATRIX_FILE), arrays, "sparse matrix")


def _load_tfidf(folder: str) -> tuple[TfidfFeaturizer, csr_matrix]:
    tfidf = TfidfFeaturizer.from_pretrained(folder)
    arrays, _ = load_tensors(os.path.join(folder, _MATRIX_FILE), "sparse matrix")
    shape = (len(arrays["indptr"]) - 1, tfidf.num_features)
    # Checking the matrix would read all of it, and copy what is mapped.
    matrix = csr_matrix(shape, dtype=arrays["data"].dtype)
    matrix.data, matrix.indices, matrix.indptr = arrays["data"], arrays["indices"], arrays["indptr"]
    return tfidf, matrix


def build_label_tree(
    model: XMCForTextClassification,
    features: Features,
    targets: csr_matrix,
    args: XMCTrainingArguments,
    stages: StageTimer,
    arguments: TreeArguments | None = None,
) -> LabelTree:
    """The label tree of documents with these features; its shape is that of the options by default."""
    arguments = args.make_tree_arguments() if arguments is None else arguments
    if arguments.clustering == "flat":
        return LabelTree.flat(targets.shape[1])
    if arguments.clustering == "frequency":
        counts = np.bincount(targets.indices, minlength=targets.shape[1])
        return frequency_tree(counts, arguments.shares, arguments.shares_of)

    def make() -> LabelTree:
        label_features = describe_labels(
            model, features, targets, args.label_features, _LABEL_MAX_FEATURES, args.num_threads
        )
        return build_tree(label_features, arguments, args.num_threads, stages.report)

    return stages.work.once("label tree", make, LabelTree.save_pretrained, LabelTree.from_pretrained)
