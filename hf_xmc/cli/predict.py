"""`hf-xmc predict`: tags the documents of a file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, TextIO

import numpy as np
import torch
from datasets import Dataset
from tqdm.auto import tqdm

from ..data.xmc_text import has_xmc_header
from ..files import atomic_write
from ..modeling_xmc import PREDICT_WITH
from ..outputs import XMCOutput
from ..tagging import TextTagger
from ..training.prediction import predict_batches
from .arguments import load_model, load_split

DESCRIPTION = """
Writes one line of JSON per document, in their order: {"labels": [{"label": ..., "score": ...}, ...]}. The input is
read and the output written piece by piece: neither has to fit into memory. INPUT is any data set that can be trained
on (its labels are ignored), a .txt file with a document per line, or - for such lines from standard input.
"""

Predictions = Iterator[list[tuple[str, float]]]


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = argparse.ArgumentParser(prog="hf-xmc predict", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id of the model")
    parser.add_argument("input", metavar="INPUT", help="file, folder or Hub id of the documents; - for standard input")
    parser.add_argument("--output", required=True, help="file of JSON lines; - for standard output")
    parser.add_argument("--split", help="split of the input, where it has several")
    parser.add_argument("--text-column", default="text", help="column of the texts")
    parser.add_argument("--top-k", type=int, help="labels per document; that of the model by default")
    parser.add_argument("--threshold", type=float, default=0.0, help="leave out labels with a smaller score")
    parser.add_argument("--beam-size", type=int, help="nodes kept per level; 0 keeps all")
    parser.add_argument("--batch-size", type=int, default=1024, help="documents that are worked on together")
    parser.add_argument("--predict-with", choices=PREDICT_WITH, help="what predicts; as the model says by default")
    parser.add_argument("--num-threads", type=int, help="threads to use; all cores by default")
    parser.add_argument("--overwrite", action="store_true", help="replace an output file that exists")
    return parser


def run(argv: Sequence[str]) -> None:
    """Runs the command."""
    args = make_parser().parse_args(argv)
    if args.output != "-" and os.path.exists(args.output) and not args.overwrite:
        raise FileExistsError(f"`{args.output}` exists already. Choose another `--output`, or give `--overwrite`.")
    if args.batch_size < 1:
        raise ValueError(f"`--batch-size` must be at least 1, not {args.batch_size}.")
    model = load_model(args.model)
    if args.predict_with is not None:
        model.config.predict_with = args.predict_with
    with _documents(args) as documents:
        total = len(documents) if isinstance(documents, Dataset) else None
        predictions = _dataset(model, documents, args) if total is not None else _lines(model, documents, args)
        with _output(args.output) as file:
            for pairs in tqdm(predictions, total=total, desc="predict", unit="doc"):
                found = [
                    {"label": label, "score": round(score, 6)} for label, score in pairs if score >= args.threshold
                ]
                file.write(json.dumps({"labels": found}, ensure_ascii=False) + "\n")


def _documents(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """The input: a `Dataset`, or an open text file with a document per line."""
    if args.input == "-":
        return nullcontext(sys.stdin)
    if args.input.endswith(".txt") and os.path.isfile(args.input) and not has_xmc_header(args.input):
        return open(args.input, encoding="utf-8")
    mapping = {} if args.text_column == "text" else {args.text_column: "text"}
    return nullcontext(load_split(args.input, args.split, mapping, require_labels=False))


@contextmanager
def _output(path: str) -> Iterator[TextIO]:
    if path == "-":
        yield sys.stdout
        return
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        yield file


def _lines(model: TextTagger, lines: Iterable[str], args: argparse.Namespace) -> Predictions:
    lines = iter(lines)
    while batch := [line.rstrip("\r\n") for line in islice(lines, args.batch_size)]:
        yield from model.predict(batch, args.top_k, args.beam_size, args.batch_size, args.num_threads)


def _dataset(model: TextTagger, dataset: Dataset, args: argparse.Namespace) -> Predictions:
    batches: Iterator[tuple[np.ndarray, np.ndarray]] = predict_batches(
        model, dataset, args.top_k, args.beam_size, args.batch_size, args.num_threads
    )
    for scores, indices in batches:
        yield from model.name_labels(XMCOutput(scores=torch.from_numpy(scores), indices=torch.from_numpy(indices)))
