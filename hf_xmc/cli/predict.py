"""`hf-xmc predict`: tags the documents of files."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

from datasets import Dataset, Features
from tqdm.auto import tqdm

from ..data.corpus import Batch, Corpus, find_sources
from ..data.discovery import texts_of
from ..inference.corpus import (
    PredictionArguments,
    PredictionJob,
    check_output_name,
    corpus_columns,
    predict_corpus,
    predict_documents,
    predict_range,
)
from ..inference.predict import chunk_size
from ..inference.writers import Predictions, json_lines, parquet_schema, prediction_writer
from ..modeling_utils import PredictMixin
from ..parallel.process_group import ProcessGroup
from ..parallel.stage_cache import Runtime
from ..training.progress import format_count, quiet_libraries
from ..utils import Progress
from .arguments import load_model, load_split, recorded_columns


def run(args: argparse.Namespace) -> None:
    """Runs the command."""
    args.text_column = args.text_column or texts_of(recorded_columns(args.model)) or None
    for name in ("labels", "exclude", "under"):
        setattr(args, name, _label_list(getattr(args, name)))
    names = [field.name for field in fields(PredictionArguments)]
    arguments = PredictionArguments(**{name: getattr(args, name) for name in names})
    processes = ProcessGroup.current()
    _check_standard_streams(args, processes.count)
    with processes.main_first():  # it downloads the model to the cache
        model = load_model(args.model, args.dtype).to(processes.device)
    has_names = model.labels is not None and bool(model.labels.other_names)
    with quiet_libraries(), _progress_bar(disable=None if processes.is_main else True) as progress:
        if args.input == ["-"]:
            _write_stream(_predict_lines(model, arguments, args.num_threads), args.output, has_names)
        elif args.output == "-":
            _write_stream(_predict_files(model, args, arguments, progress), args.output, has_names)
        else:
            job = predict_corpus(
                model,
                _inputs(args),
                args.output,
                arguments,
                split=args.split,
                format=args.format,
                overwrite=args.overwrite,
                runtime=Runtime(args.num_threads, progress),
            )
    if processes.is_main and "-" not in (*args.input, args.output):
        print(_summary(job, args.output), file=sys.stderr)
    processes.close()


def _label_list(values: list[str] | None) -> list[str] | None:
    """Labels given on the command line; `@FILE` stands for the lines of a file."""
    if values is None:
        return None
    labels: list[str] = []
    for value in values:
        if not value.startswith("@"):
            labels.append(value)
            continue
        try:
            lines = Path(value[1:]).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"The labels of `{value[1:]}` cannot be read: {error}. Write one label per line."
            ) from error
        labels.extend(line for line in lines if line.strip())
    return labels


def _check_standard_streams(args: argparse.Namespace, num_processes: int) -> None:
    """Raises for options that do not fit standard input or output."""
    if "-" not in (*args.input, args.output):
        return
    if num_processes > 1:
        raise ValueError("Several processes cannot share standard input or output. Give files, and `--output FOLDER`.")
    if "-" in args.input:
        if len(args.input) > 1:
            raise ValueError("Standard input (-) cannot be mixed with files. Give one or the other.")
        if args.keep_columns:
            raise ValueError("Lines of standard input have no columns that `--keep-columns` could keep.")
        if args.output != "-" and (os.path.isdir(args.output) or not os.path.splitext(args.output)[1]):
            raise ValueError(f"Standard input goes into one file, such as `{args.output}.jsonl`, not into a folder.")
        if args.output != "-":
            check_output_name(args.output)
    if args.output == "-":
        if args.format == "parquet":
            raise ValueError("Standard output gets JSON lines. Give `--output FILE.parquet`.")
    elif os.path.exists(args.output) and not args.overwrite:
        raise FileExistsError(f"`{args.output}` exists already. Choose another `--output`, or give `--overwrite`.")


def _inputs(args: argparse.Namespace) -> list[str | Dataset]:
    """The inputs, with the bundled sample loaded."""
    return [
        load_split(item, args.split) if item == "sample" and not os.path.exists(item) else item for item in args.input
    ]


def _predict_lines(
    model: PredictMixin, arguments: PredictionArguments, num_threads: int | None
) -> Iterator[tuple[Batch, Predictions]]:
    lines, size = iter(sys.stdin), chunk_size(model, arguments.batch_size)
    arguments = replace(arguments, text_column="text")  # a line is a whole text
    while texts := [line.rstrip("\r\n") for line in islice(lines, size)]:
        yield {}, predict_documents(model, {"text": texts}, arguments, num_threads)


def _predict_files(
    model: PredictMixin, args: argparse.Namespace, arguments: PredictionArguments, progress: Progress
) -> Iterator[tuple[Batch, Predictions]]:
    corpus = Corpus(find_sources(_inputs(args), corpus_columns(model, arguments), args.split))
    done = 0
    for kept, predictions in predict_range(model, corpus, range(len(corpus)), arguments, args.num_threads):
        yield kept, predictions
        done += len(predictions)
        progress("predict", done, len(corpus))


def _write_stream(batches: Iterator[tuple[Batch, Predictions]], output: str, has_names: bool) -> None:
    """Writes predictions to standard output or to one file."""
    if output == "-":
        for kept, predictions in batches:
            sys.stdout.writelines(json_lines(kept, predictions))
        return
    schema = parquet_schema(Features(), has_names) if output.lower().endswith(".parquet") else None
    with prediction_writer(output, schema) as write:
        for kept, predictions in batches:
            write(kept, predictions)


@contextmanager
def _progress_bar(disable: bool | None) -> Iterator[Progress]:
    """Yields a callback that shows a bar for the running stage; with `disable=None` only in a terminal."""
    bars: dict[str, tqdm] = {}

    def show(stage: str, done: int, total: int) -> None:
        if stage not in bars:
            for earlier in bars.values():
                earlier.close()
            unit = "doc" if stage == "predict" else "file"
            bars[stage] = tqdm(total=total, desc=stage, unit=unit, disable=disable, leave=False)
        bars[stage].update(done - bars[stage].n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()


def _summary(job: PredictionJob, output: str) -> str:
    documents = format_count(job.documents, "document")
    if job.parts > 1:
        documents += f" in {job.parts:,} parts"
    if job.resumed == job.parts:
        return f"`{output}` is complete already: {documents}."
    earlier = f", {job.resumed:,} of them finished by an earlier run" if job.resumed else ""
    return f"{documents}{earlier}; written to {output}."
