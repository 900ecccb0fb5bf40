"""
Labels without training documents: are they found by their texts, and what do they cost the other labels?

    python -m benchmarks.unseen_labels --dataset sample --split validation
    python -m benchmarks.unseen_labels --dataset DATA --documents 50000 --test_documents 3000 --encoder FOLDER

Takes away all training documents of a random tenth of the labels, trains with the texts of all labels, and looks for
the labels taken away in the documents of a split that have any of them. For comparison: BM25 of the document over the
texts of the labels and, with an encoder, cosine of the vectors of document and text. A second training without these
labels shows what they cost the others.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import CountVectorizer

from benchmarks.parts import data_parser, read, take_labels
from hf_xmc import XMCTrainer, XMCTrainingArguments
from hf_xmc.evaluation import XMCMetrics
from hf_xmc.inference.predict import predict_batches
from hf_xmc.modeling_xmc import XMCForTextClassification

_SHARE, _TOP_K, _BATCH = 0.1, 10, 500


def bm25(documents: Sequence[str], texts: Sequence[str], k: float = 1.2, b: float = 0.75) -> csr_matrix:
    """Scores of label texts for documents as queries (Robertson and Zaragoza 2009)."""
    stems = CountVectorizer(analyzer=lambda text: [word.rstrip("s") for word in re.findall(r"\w\w+", text.lower())])
    counts = stems.fit_transform(texts).astype(np.float64)
    lengths = np.asarray(counts.sum(axis=1)).ravel()
    frequency = np.bincount(counts.indices, minlength=counts.shape[1])
    idf = np.log1p((len(texts) - frequency + 0.5) / (frequency + 0.5))
    rows = np.repeat(np.arange(len(texts)), np.diff(counts.indptr))
    norms = k * (1 - b + b * lengths / lengths.mean())
    counts.data = idf[counts.indices] * counts.data * (k + 1) / (counts.data + norms[rows])
    queries = stems.transform(documents)
    queries.data[:] = 1
    return csr_matrix(queries.astype(np.float64) @ counts.T)


def recall(ranked: np.ndarray, truth: csr_matrix, wanted: np.ndarray) -> float:
    """Share of the true labels among `wanted` that are ranked, over all documents."""
    found = total = 0
    for row, labels in enumerate(ranked):
        true = set(truth[row].indices) & set(wanted.tolist())
        found, total = found + len(true & set(labels.tolist())), total + len(true)
    return found / max(total, 1)


def best(scores: Any, columns: np.ndarray | None = None) -> np.ndarray:
    """The ten best columns of each row, of all or of some columns."""
    found = []
    for start in range(0, scores.shape[0], _BATCH):
        block = scores[start : start + _BATCH]
        block = np.asarray(block.todense()) if hasattr(block, "todense") else block
        block = block if columns is None else block[:, columns]
        order = np.argsort(-block, axis=1, kind="stable")[:, :_TOP_K]
        found.append(order if columns is None else columns[order])
    return np.concatenate(found)


def train(
    args: argparse.Namespace, data: Dataset, texts: dict[str, str], **options: Any
) -> tuple[XMCForTextClassification, float]:
    """Trains with the default options, and returns the model and the seconds."""
    settings: dict[str, Any] = {"save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    if args.encoder:
        settings |= {"method": "xr-transformer", "encoder_name": args.encoder, "num_train_epochs": 0}
        settings |= {"encoder_max_length": args.max_length, "per_device_eval_batch_size": 64}
        settings |= {"embedding_cache": args.embedding_cache}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = XMCTrainer(
            args=XMCTrainingArguments(folder, **settings),
            train_dataset=data,
            label_texts=texts,
            **options,
        )
        trainer.train()
    return trainer.model, time.perf_counter() - start


def main() -> None:
    """Prints the tables."""
    args = data_parser(__doc__).parse_args()
    documents, _, test, texts = read(args)
    names, texts, taken = take_labels(documents, texts, _SHARE)

    def seen_only(data: Dataset) -> Dataset:
        return data.select([i for i, row in enumerate(data["labels"]) if not taken & set(row)])

    kept = seen_only(documents)
    left = {label for row in kept["labels"] for label in row}
    texts = {name: text for name, text in texts.items() if name in left | taken}
    print(
        f"{args.dataset}, {args.split}: {len(taken)} of {len(names)} labels taken away, {len(kept):,} of "
        f"{len(documents):,} documents left"
    )
    model, seconds = train(args, kept, texts)
    without, seconds_without = train(args, kept, texts, labels_seen_only=True)
    assert model.labels is not None and without.labels is not None
    truth = model.labels.encode(test)
    unseen = np.flatnonzero(model.labels.counts == 0)
    asked = np.flatnonzero((truth[:, unseen].sum(axis=1) > 0).A1)
    queries, wanted = test.select(asked), truth[asked]
    print(f"{len(unseen)} labels without documents, {len(asked)} documents with any of them\n")

    label_texts = model.labels.readable_texts()
    rows = {"BM25": bm25(queries["text"], label_texts)}
    if model.encoder is not None:
        rows["cosine of MiniLM"] = model.embed(queries["text"], 64) @ model.embed(label_texts, 64).T
    print("| | recall@10 among all labels | among those without documents |\n| --- | ---: | ---: |")
    for name, scores in rows.items():
        found = best(scores), best(scores, unseen)
        print(f"| {name} | {' | '.join(f'{recall(ranked, wanted, unseen):.1%}' for ranked in found)} |")
    features = model.featurize(queries["text"], batch_size=64)
    restriction = model.restrict(labels=[model.labels[i] for i in unseen])
    for name in ("all", *model.available_parts):
        everywhere = model(features, _TOP_K, predict_with=name).indices.numpy()
        among = model(features, _TOP_K, predict_with=name, restriction=restriction).indices.numpy()
        title = "hf_xmc" if name == "all" else f"its part {name}"
        print(f"| {title} | {recall(everywhere, wanted, unseen):.1%} | {recall(among, wanted, unseen):.1%} |")

    others = seen_only(test)
    print(f"\n{len(others):,} documents without these labels:\n")
    print("| | P@1 | nDCG@5 | PSP@5 | seconds |\n| --- | ---: | ---: | ---: | ---: |")
    for name, trained, took in (("with", model, seconds), ("without", without, seconds_without)):
        labels = trained.labels
        metrics = XMCMetrics(counts=labels.counts, num_documents=labels.num_documents)
        answers, start = labels.encode(others, keep_unseen=True), 0
        for _, indices in predict_batches(trained, others, _TOP_K, batch_size=64):
            metrics.update(indices, answers[start : start + len(indices)])
            start += len(indices)
        values = metrics.compute()
        shown = " | ".join(f"{100 * values[metric]:.2f}" for metric in ("P@1", "nDCG@5", "PSP@5"))
        print(f"| {name} them | {shown} | {took:.0f} |")


if __name__ == "__main__":
    main()
