"""
Further documents for a trained model, against a new model of all documents: quality and processor time.

    python -m benchmarks.warm_start --dataset sample --split validation
    python -m benchmarks.warm_start --dataset DATA --documents 50000 --test_documents 5000
    python -m benchmarks.warm_start --dataset DATA --encoder ENCODER --embedding_cache FOLDER

A random tenth of the training documents is new. A model is trained on the others and then extended.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import numpy as np
from datasets import Dataset

from benchmarks.parts import data_parser, load
from hf_xmc import XMCTrainer, XMCTrainingArguments
from hf_xmc.inference.predict import evaluate_model

_SHARE = 0.1


def train(args: argparse.Namespace, folder: str, data: Dataset, texts: Any, **given: Any) -> tuple[XMCTrainer, float]:
    """Trains a model with the default options, or extends one; returns the processor seconds, too."""
    settings: dict[str, Any] = {"save_strategy": "no", "disable_tqdm": True, "report_to": "none", "num_threads": 1}
    settings |= {"embedding_cache": args.embedding_cache}
    if args.encoder and not given:
        settings |= {"encoder_name": args.encoder, "num_train_epochs": 0, "encoder_max_length": args.max_length}
    trainer = XMCTrainer(args=XMCTrainingArguments(folder, **settings), train_dataset=data, label_texts=texts, **given)
    start = time.process_time()
    trainer.train()
    return trainer, time.process_time() - start


def report(name: str, trained: tuple[XMCTrainer, float], test: Dataset) -> None:
    """Prints a row of the table."""
    trainer, seconds = trained
    scores = evaluate_model(trainer.model, test).compute()
    cells = [f"{100 * scores[metric]:.2f}" for metric in ("P@1", "nDCG@5", "PSP@5")]
    print(f"| {name} | {' | '.join(cells)} | {seconds:.1f} |", flush=True)


def main() -> None:
    """Prints the table."""
    args = data_parser(__doc__, split="test").parse_args()
    is_validation, args.split = args.split == "validation", "test"
    documents, validation, test, texts = load(args)
    test = validation if is_validation else test
    order = np.random.default_rng(0).permutation(len(documents))
    num_new = int(_SHARE * len(order))
    new, previous = documents.select(np.sort(order[:num_new])), documents.select(np.sort(order[num_new:]))
    print(f"{args.dataset}: {len(previous):,} documents and {len(new):,} new ones, {len(test):,} to measure on\n")
    print("| model | P@1 | nDCG@5 | PSP@5 | training, CPU s |\n| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as root:
        report("previous documents", train(args, os.path.join(root, "old"), previous, texts), test)
        given: dict[str, Any] = {"model": os.path.join(root, "old"), "previous_dataset": previous}
        report("extended", train(args, os.path.join(root, "new"), new, texts, **given), test)
        report("all documents", train(args, os.path.join(root, "whole"), documents, texts), test)


if __name__ == "__main__":
    main()
