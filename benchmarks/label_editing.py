"""
Labels added to a finished model, against a new training with them.

    python -m benchmarks.label_editing --dataset sample --split validation
    python -m benchmarks.label_editing --dataset DATA --documents 20000 --test_documents 3000 --encoder FOLDER
    python -m benchmarks.label_editing --model FOLDER --add 1000

Takes away all training documents of a random tenth of the labels, trains without these labels, and adds them with
their texts and 0, 1 or 5 of their documents. Each is compared with a training on the same documents. With `--model`,
measures seconds and peak memory of adding labels to a trained model.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets

from benchmarks.parts import data_parser, load, take_labels
from hf_xmc import XMCForTextClassification, XMCTrainer, XMCTrainingArguments
from hf_xmc.evaluation import XMCMetrics
from hf_xmc.inference.predict import predict_batches

_SHARE, _TOP_K = 0.1, 10
_EXAMPLES = (0, 1, 5)


def train(args: argparse.Namespace, data: Dataset, texts: dict[str, str]) -> tuple[XMCForTextClassification, float]:
    """Trains a linear model or, with an encoder, one without heads; returns it and the seconds."""
    settings: dict[str, Any] = {"save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    if args.encoder:
        settings |= {"encoder_name": args.encoder, "encoder_max_length": args.max_length, "method": "xr-transformer"}
        settings |= {"level_objective": "label_texts", "num_train_epochs": 0, "embedding_cache": args.embedding_cache}
        settings |= {"per_device_eval_batch_size": 64}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        arguments = XMCTrainingArguments(folder, **settings)
        trainer = XMCTrainer(args=arguments, train_dataset=data, label_texts=texts)
        trainer.train()
    return trainer.model, time.perf_counter() - start


def measure(model: XMCForTextClassification, test: Dataset, taken: set[str], predict_with: str) -> list[float]:
    """P@1 and nDCG@5 of all documents, nDCG@5 of those without the labels taken away, recall@10 of these labels."""
    labels = model.labels
    assert labels is not None
    truth = labels.encode(test, keep_unseen=True)
    has_taken = np.array([bool(taken & set(row)) for row in test["labels"]])
    everything, others = (XMCMetrics(counts=labels.counts, num_documents=labels.num_documents) for _ in range(2))
    start = found = 0
    for _, indices in predict_batches(model, test, _TOP_K, batch_size=64, predict_with=predict_with):
        rows = np.arange(start, start + len(indices))
        start += len(indices)
        everything.update(indices, truth[rows])
        if (left := np.flatnonzero(~has_taken[rows])).size:
            others.update(indices[left], truth[rows[left]])
        for row, own in zip(rows[has_taken[rows]], indices[has_taken[rows]], strict=True):
            found += len({labels[i] for i in own if i >= 0} & taken & set(test[int(row)]["labels"]))
    wanted = sum(len(taken & set(row)) for row in test["labels"])
    values = everything.compute()
    return [values["P@1"], values["nDCG@5"], others.compute()["nDCG@5"], found / max(wanted, 1)]


def knows(model: XMCForTextClassification, text: str) -> bool:
    """Whether a text has a word that the model knows."""
    return model.encoder is not None or (model.tfidf is not None and model.tfidf.transform([text]).nnz > 0)


def compare(args: argparse.Namespace) -> None:
    """Prints the table of edited and retrained models."""
    documents, _, test, texts = load(args)
    names, texts, taken = take_labels(documents, texts, _SHARE)
    has_taken = np.array([bool(taken & set(row)) for row in documents["labels"]])
    kept, removed = documents.select(np.flatnonzero(~has_taken)), documents.select(np.flatnonzero(has_taken))
    left = {label for row in kept["labels"] for label in row}
    known = {name: text for name, text in texts.items() if name in left}
    print(
        f"{args.dataset}, {args.split}: {len(taken)} of {len(names)} labels taken away, {len(kept):,} of "
        f"{len(documents):,} documents left, {len(test):,} documents measured\n"
    )
    places: dict[str, list[int]] = {name: [] for name in sorted(taken)}
    for row, labels in enumerate(removed["labels"]):
        for name in taken & set(labels):
            places[name].append(row)
    columns = "P@1 | nDCG@5 | nDCG@5 of documents without these labels | recall@10 of these labels | seconds"
    print(f"| model | predicts with | {columns} |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |")

    def show(title: str, model: XMCForTextClassification, seconds: float) -> None:
        for predict_with in ("all", "ranker"):
            values = [f"{100 * value:.1f}" for value in measure(model, test, taken, predict_with)]
            print(f"| {title} | {predict_with} | {' | '.join(values)} | {seconds:.1f} |", flush=True)

    finished, seconds = train(args, kept, known)
    show("without these labels", finished, seconds)
    with tempfile.TemporaryDirectory() as folder:
        finished.save_pretrained(folder)
        for count in _EXAMPLES:
            chosen = {name: rows[:count] for name, rows in places.items() if rows[:count]}
            examples = {name: removed.select(rows)["text"] for name, rows in chosen.items()}
            model = XMCForTextClassification.from_pretrained(folder)
            start = time.perf_counter()
            # The others, of which the model knows no word, count as missed.
            added = [name for name in places if name in examples or knows(model, texts[name])]
            model.add_labels({name: texts[name] for name in added}, {name: [*rows] for name, rows in examples.items()})
            show(f"added, {count} examples", model, time.perf_counter() - start)
            if not args.edits_only:
                used = sorted({row for rows in chosen.values() for row in rows})
                data = concatenate_datasets([kept, removed.select(used)])
                in_data = {label for row in data["labels"] for label in row} | taken
                show(f"trained, {count} examples", *train(args, data, {name: texts[name] for name in sorted(in_data)}))


def time_edits(args: argparse.Namespace) -> None:
    """Prints seconds and peak memory of adding and removing labels."""
    model = XMCForTextClassification.from_pretrained(args.model)
    assert model.labels is not None
    model.predict(["a text"])
    texts = model.labels.readable_texts()
    generator = np.random.default_rng(0)
    # Texts of two labels each are like those of the model, and new.
    pairs = generator.integers(len(texts), size=(args.add, 2))
    new = {f"new label {i}": f"{texts[a]} {texts[b]}" for i, (a, b) in enumerate(pairs)}
    model.add_labels({"warm up": texts[0]})  # compiles the loops

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    print(f"{len(model.labels):,} labels, {peak():,.0f} MB after loading and one label\n")
    print("| | seconds | CPU seconds | peak memory so far, MB |\n| --- | ---: | ---: | ---: |")
    steps: dict[str, Any] = {
        f"add {args.add:,} labels": lambda: model.add_labels(new),
        f"remove {args.add:,} labels": lambda: model.remove_labels(list(new)),
    }
    for title, step in steps.items():
        start, start_cpu = time.perf_counter(), time.process_time()
        step()
        seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        print(f"| {title} | {seconds:.1f} | {cpu:.1f} | {peak():,.0f} |", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = data_parser(__doc__)
    parser.add_argument("--edits_only", action="store_true", help="do not train again")
    parser.add_argument("--model", help="measure the time of edits of this model")
    parser.add_argument("--add", type=int, default=1000, help="number of labels to add to it")
    args = parser.parse_args()
    time_edits(args) if args.model else compare(args)


if __name__ == "__main__":
    main()
