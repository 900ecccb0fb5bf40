"""
What each part of a model adds under the last scorer, and what it costs.

    python -m benchmarks.parts --dataset sample --split test
    python -m benchmarks.parts --dataset DATA --documents 50000 --test_documents 3000 --encoder FOLDER --max_length 48

Trains once with all parts, on the training documents without those of the last scorer: the split `validation` if there
is one, else a random tenth (at most 5,000). A scorer is fitted for each set of parts on these documents, and all are
measured on the same test documents. Prints tables of accuracy, calibration, size and latency.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from scipy.sparse import csr_matrix

from hf_xmc import XMCTrainer, XMCTrainingArguments, load_label_texts, load_sample, load_xmc_dataset
from hf_xmc.evaluation import XMCMetrics
from hf_xmc.features import Features
from hf_xmc.inference.predict import evaluate_model
from hf_xmc.modeling_xmc import XMCForTextClassification
from hf_xmc.parallel.stage_cache import Runtime
from hf_xmc.training.scoring import (
    fit_scorer,
    held_out_documents,
    join_candidates,
    rank_candidates,
    score_candidates,
)

_TFIDF = ("text_tfidf", "centroid_tfidf")
_VECTORS = ("text_vector", "centroid_vector")
_VOTES = ("knn_tfidf", "knn_vector")
LEAN = {"predict_with": "ranker", "label_text_weight": 0.0, "tfidf_min_df": 3, "tfidf_stemmer": "none"}
_SHOWN, _GROUPS, _TIMED, _CHUNK = 10, 10, 200, 1000


def data_parser(description: str | None, split: str = "validation", max_length: int = 128) -> argparse.ArgumentParser:
    """A parser with the options of the data and of the encoder, which several benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="sample", help="folder of the data, or `sample`")
    parser.add_argument("--train", help="another file of training documents in the folder, without its extension")
    parser.add_argument(
        "--split", default=split, help="split to measure on; `train` holds out a tenth (default: %(default)s)"
    )
    parser.add_argument("--documents", type=int, help="number of training documents; all by default")
    parser.add_argument("--test_documents", type=int, help="number of documents to measure on; all by default")
    parser.add_argument("--encoder", help="folder or Hub id of an encoder")
    parser.add_argument("--max_length", type=int, default=max_length)
    parser.add_argument("--embedding_cache")
    return parser


def read(args: argparse.Namespace) -> tuple[Dataset, Dataset | None, Dataset, dict[str, str] | None]:
    """Training, validation and test documents, and the texts of the labels; `train` as split is a tenth of `train`."""
    texts = None
    if args.dataset == "sample":
        data = dict(load_sample())
    else:
        data = dict(load_xmc_dataset(args.dataset))
        if args.train:
            data["train"] = load_xmc_dataset(str(Path(args.dataset, f"{args.train}.parquet")))
        texts = load_label_texts(args.dataset) if list(Path(args.dataset).glob("labels.*")) else None
    if args.split == "train":
        data["train"], test = data["train"].train_test_split(0.1, seed=0).values()
    else:
        test = data[args.split]
    train = data["train"]
    if args.documents:
        train = train.shuffle(seed=0).select(range(args.documents))
    if args.test_documents:
        test = test.shuffle(seed=0).select(range(args.test_documents))
    return train, data.get("validation") if args.split != "validation" else None, test, texts


def load(args: argparse.Namespace) -> tuple[Dataset, Dataset, Dataset, dict[str, str] | None]:
    """As `read`; the validation documents are some of the training documents if there are no others."""
    train, validation, test, texts = read(args)
    if validation is None:
        rows = held_out_documents(len(train), seed=0)
        validation = train.select(rows)
        train = train.select(np.setdiff1d(np.arange(len(train)), rows))
    return train, validation, test, texts


def take_labels(
    documents: Dataset, texts: dict[str, str] | None, share: float
) -> tuple[list[str], dict[str, str], set[str]]:
    """All labels of documents, their texts (by default themselves), and a random share of those that have one."""
    names = sorted({label for row in documents["labels"] for label in row})
    texts = {name: texts.get(name, "") for name in names} if texts else {name: name for name in names}
    named = [name for name in names if texts[name]]
    return names, texts, set(np.random.default_rng(0).choice(named, int(share * len(named)), replace=False).tolist())


def train_model(args: argparse.Namespace, folder: str) -> tuple[XMCForTextClassification, Dataset, Dataset, float]:
    """A model with all parts, the documents of the scorer, those of the test, and the seconds of the training."""
    train, validation, test, texts = load(args)
    options: dict[str, Any] = {"save_strategy": "no", "similar_documents": True, "ranker_beam_size": args.beam_size}
    if args.encoder:
        options |= {"encoder_name": args.encoder, "encoder_max_length": args.max_length}
        options |= {"time_budget": args.minutes} if args.minutes else {"num_train_epochs": args.epochs}
        options |= {"embedding_cache": args.embedding_cache, "method": "xr-transformer"}
        options |= {"level_objective": args.objective, "learning_rate": args.learning_rate}
        options |= {"per_device_train_batch_size": args.batch_size, "bf16": args.bf16}
        options |= {"per_device_eval_batch_size": 64}
    trainer = XMCTrainer(
        args=XMCTrainingArguments(folder, **options),
        train_dataset=train,
        eval_dataset=validation,
        label_texts=texts,
    )
    start = time.perf_counter()
    trainer.train()
    return trainer.model, validation, test, time.perf_counter() - start


def measure_lean(args: argparse.Namespace) -> dict[str, float]:
    """Results of the model without parts: the linear ranker with the defaults of version 0.1."""
    train, _, test, _ = load(args)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"save_strategy": "no", "ranker_beam_size": args.beam_size, **LEAN}
        trainer = XMCTrainer(args=XMCTrainingArguments(folder, **options), train_dataset=train)
        trainer.train()
        return evaluate_model(trainer.model, test, ks=(1, 5), runtime=Runtime()).compute()


def chunks(model: XMCForTextClassification, dataset: Dataset) -> Iterator[Features]:
    """Features of some documents at a time."""
    for start in range(0, len(dataset), _CHUNK):
        yield model.featurize(dataset[start : start + _CHUNK]["text"], batch_size=64)


def sets_of_parts(model: XMCForTextClassification) -> dict[str, list[str]]:
    """The rows of the table."""
    available = model.available_parts
    base = [name for name in ("ranker",) if name in available]
    rows = {
        "ranker": base,
        "+ TF-IDF parts": [*base, *_TFIDF],
        "+ vector parts": [*base, *_VECTORS],
        "+ both": [*base, *_TFIDF, *_VECTORS],
        "+ both, heads": [*base, "heads", *_TFIDF, *_VECTORS],
        "+ both, similar documents": [*base, "heads", *_TFIDF, *_VECTORS, *_VOTES],
    }
    found = {title: [name for name in names if name in available] for title, names in rows.items()}
    return {title: names for i, (title, names) in enumerate(found.items()) if names not in list(found.values())[:i]}


def reliability(labels: np.ndarray, probabilities: np.ndarray, truth: csr_matrix) -> list[tuple[int, float, float]]:
    """Number, mean probability and share of true labels in groups of equal size."""
    document, place = np.nonzero(labels >= 0)
    is_true = np.asarray(truth[document, labels[document, place]]).ravel() > 0
    given = probabilities[document, place]
    groups = np.array_split(np.argsort(given), _GROUPS)
    return [(len(rows), float(given[rows].mean()), float(is_true[rows].mean())) for rows in groups]


def latency(model: XMCForTextClassification, texts: list[str], **options: Any) -> float:
    """Median milliseconds of a single document, from its text."""
    seconds = []
    for text in texts:
        start = time.perf_counter()
        model.predict([text], top_k=5, num_threads=1, **options)
        seconds.append(time.perf_counter() - start)
    return 1000 * float(np.median(seconds))


def main() -> None:
    """Runs the benchmark."""
    parser = data_parser(__doc__, max_length=48)
    parser.add_argument("--minutes", type=float, default=0, help="minutes of fine-tuning")
    parser.add_argument("--epochs", type=float, default=0, help="passes of fine-tuning, without minutes")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--objective", default="label_texts")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--beam_size", type=int, help="by the number of labels by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, validation, test, seconds = train_model(args, folder)
        sizes = {path.name: path.stat().st_size for path in Path(folder).iterdir() if path.is_file()}
    assert model.labels is not None
    names, log_counts = model.available_parts, model.labels.log_counts
    fitted = [score_candidates(model, features, names) for features in chunks(model, validation)]
    tested = join_candidates(score_candidates(model, features, names) for features in chunks(model, test))
    truth, known = model.labels.encode(test, keep_unseen=True), model.labels.encode(validation)
    print(f"{vars(args)}\n{len(test):,} documents, trained in {seconds:.0f} s\n")
    lean = {name: 100 * value for name, value in measure_lean(args).items()}
    print("| parts | P@1 | P@5 | nDCG@5 | PSP@5 | ECE of the best 10 |\n|---|---:|---:|---:|---:|---:|")
    shown = " | ".join(f"{lean[name]:.2f}" for name in ("P@1", "P@5", "nDCG@5", "PSP@5"))
    print(f"| lean ranker, as in version 0.1 | {shown} | - |", flush=True)
    for title, parts in sets_of_parts(model).items():
        columns = [names.index(name) for name in parts]
        selected = [
            {**chunk, "scores": chunk["scores"][:, columns], "differences": chunk["differences"][:, columns]}
            for chunk in fitted
        ]
        scorer = fit_scorer(parts, selected, known, log_counts)
        labels, probabilities = rank_candidates(scorer, names, tested, log_counts, _SHOWN)
        metrics = XMCMetrics(ks=(1, 5), counts=model.labels.counts, num_documents=model.labels.num_documents)
        metrics.update(labels[:, :5], truth)
        values = {name: 100 * value for name, value in metrics.compute().items()}
        groups = reliability(labels, probabilities, truth)
        error = sum(count * abs(given - true) for count, given, true in groups) / sum(count for count, *_ in groups)
        shown = " | ".join(f"{values[name]:.2f}" for name in ("P@1", "P@5", "nDCG@5", "PSP@5"))
        print(f"| {title} | {shown} | {error:.3f} |", flush=True)
    print("\nReliability of the last row, ten groups: probability / share of true labels")
    print(", ".join(f"{given:.3f} / {true:.3f}" for _, given, true in groups))
    texts = test[: min(_TIMED, len(test))]["text"]
    model.predict(texts[:20], predict_with="all")
    for kind in ("ranker", "all"):
        print(f"one document, `predict_with={kind!r}`: {latency(model, texts, predict_with=kind):.2f} ms")
    print("files: " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sorted(sizes.items()) if size > 1e5))


if __name__ == "__main__":
    main()
