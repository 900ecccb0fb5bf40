"""
What label texts add, and what they cost: trainings with `label_texts=False`, and with texts of several weights.

    python -m benchmarks.label_texts --dataset sample --split validation --weights 0.25 0.5 1
    python -m benchmarks.label_texts --dataset DATA --documents 50000 --test_documents 3000 --encoder FOLDER

Each training runs in a process of its own, which gives CPU time and peak memory; with an encoder, the vectors of the
documents are made before, and count for neither. Recall@5 is that of the labels with 0, 1, 2-5, 6-20 and more training
documents. The last column is the median time of single documents; the models take turns on each document.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parts import data_parser, read
from hf_xmc import XMCForTextClassification, XMCTrainer, XMCTrainingArguments
from hf_xmc.evaluation import XMCMetrics
from hf_xmc.inference.predict import predict_batches

_BUCKETS, _TIMED, _WARMUP = (0, 1, 5, 20), 300, 20


def run(args: argparse.Namespace, weight: float | None, folder: str) -> dict[str, Any]:
    """Trains and saves a model, without label texts if there is no weight, and returns its results."""
    train, _, test, texts = read(args)
    options: dict[str, Any] = {"save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    if args.encoder:
        options |= {"method": "xr-transformer", "encoder_name": args.encoder, "num_train_epochs": 0}
        options |= {"encoder_max_length": args.max_length, "per_device_eval_batch_size": 64}
        options |= {"embedding_cache": args.embedding_cache}
    if weight is not None:
        options["label_text_weight"] = weight
    trainer = XMCTrainer(
        args=XMCTrainingArguments(folder, **options),
        train_dataset=train,
        label_texts=False if weight is None else texts,
    )
    start = time.process_time()
    trainer.train()
    seconds, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainer.save_model(folder)
    model, labels = trainer.model, trainer.model.labels
    assert labels is not None
    metrics = XMCMetrics(ks=(1, 5), counts=labels.counts, num_documents=labels.num_documents, bucket_limits=_BUCKETS)
    truth, done = labels.encode(test, keep_unseen=True), 0
    for _, indices in predict_batches(model, test, 5, batch_size=64):
        metrics.update(indices, truth[done : done + len(indices)])
        done += len(indices)
    seen = labels.counts[labels.counts > 0]
    return {
        "metrics": metrics.compute(),
        "buckets": metrics.by_frequency(),
        "seconds": seconds,
        "peak": peak / 1024,
        "documents": len(train),
        "labels": len(labels),
        "median": float(np.median(seen)),
        "texts": test[: _TIMED + _WARMUP]["text"],
    }


def latencies(folders: list[str], texts: list[str]) -> list[float]:
    """Median milliseconds of single documents for each model, in turns."""
    models = [XMCForTextClassification.from_pretrained(folder) for folder in folders]
    seconds = np.empty((len(texts), len(models)))
    for row, text in enumerate(texts):
        for place in np.roll(np.arange(len(models)), row):
            start = time.perf_counter()
            models[place].predict([text], top_k=5, num_threads=1)
            seconds[row, place] = time.perf_counter() - start
    return (1000 * np.median(seconds[_WARMUP:], axis=0)).tolist()


def main() -> None:
    """Prints the table."""
    parser = data_parser(__doc__)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.5], help="values of `label_text_weight`")
    args = parser.parse_args()
    variants: list[float | None] = [None, *args.weights]
    with tempfile.TemporaryDirectory() as folder:
        if args.encoder:
            args.embedding_cache = args.embedding_cache or str(Path(folder, "vectors"))
            variants = [None, *variants]  # the first one makes the vectors of the documents
        folders = [str(Path(folder, str(i))) for i in range(len(variants))]
        results = []
        for weight, path in zip(variants, folders, strict=True):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                results.append(pool.submit(run, args, weight, path).result())
        if args.encoder:
            variants, folders, results = variants[1:], folders[1:], results[1:]
        times = latencies(folders, results[0]["texts"])
    names = [row["bucket"] for row in results[0]["buckets"]]
    first = results[0]
    print(f"\n{args.dataset}, {args.split}: {first['documents']:,} documents, {first['labels']:,} labels in them")
    print(f"(median {first['median']:g} documents), {results[-1]['labels']:,} labels with label texts\n")
    print(f"| | P@1 | nDCG@5 | PSP@5 | {' | '.join(f'R@5, {name}' for name in names)} | CPU, s | MB | ms |")
    print(f"|---|{'---:|' * (6 + len(names))}")
    for weight, result, latency in zip(variants, results, times, strict=True):
        shown = [f"{100 * result['metrics'][name]:.2f}" for name in ("P@1", "nDCG@5", "PSP@5")]
        shown += ["-" if row["recall@5"] is None else f"{100 * row['recall@5']:.1f}" for row in result["buckets"]]
        shown += [f"{result['seconds']:.1f}", f"{result['peak']:,.0f}", f"{latency:.2f}"]
        print(f"| {'off' if weight is None else f'weight {weight:g}'} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
