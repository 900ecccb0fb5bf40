"""From a file to a model and its results in one call."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from transformers.utils import CONFIG_NAME

from ..data.discovery import FoundColumns
from ..data.documents import Documents, load_documents
from ..data.vocabularies import VocabularySource, vocabulary_beside
from ..evaluation.report import format_metrics, format_recall
from ..modeling_xmc import XMCForTextClassification
from ..parallel.process_group import ProcessGroup
from ..scorer import Scorer
from ..vocabulary import LabelVocabulary
from .arguments import XMCTrainingArguments
from .extension import check_extension
from .options import explain_old_name
from .progress import StageProgressCallback, format_count, format_size, quiet_libraries
from .record import TrainingRecord, public_name
from .trainer import XMCTrainer

HOLDOUT_SPLIT = "holdout"
_HOLDOUT_FOLDER = ".holdout"
# A larger part would cost time and hardly make the results more exact.
_MAX_HELD_OUT = 10_000
# With fewer, a result would say nothing.
_MIN_DOCUMENTS = 20
# Documents, so many that some of them share labels.
_MANY = 10_000
# Names of columns that are shown.
_MAX_UNUSED = 5
_SHOWN_METRICS = ("P", "R", "nDCG")


@dataclass(repr=False)
class TrainReport:
    """
    What a training has found and reached. `print` shows it as tables.

    Args:
        folder (`str`): Folder of the model.
        documents (`int`): Number of documents that the model was trained on.
        labels (`int`): Number of its labels.
        model_bytes (`int`): Size of the folder.
        seconds (`float`): Duration of all trainings.
        data ([`Documents`]): The data: columns and rows.
        split (`str`, *optional*): Split of the results. `"holdout"` was drawn from the training documents.
        tested (`int`, *optional*): Number of documents of the results.
        metrics (`dict[str, float]`, *optional*): The results as fractions, such as `"P@5"`.
        by_frequency (`list[dict]`, *optional*): Results by the number of training documents of a label.
    """

    folder: str
    documents: int
    labels: int
    model_bytes: int
    seconds: float
    data: Documents
    split: str | None = None
    tested: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    by_frequency: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        parts = []
        if self.metrics:
            ks = [k for k in (1, 3, 5, 10) if k == 1 or k < self.labels]  # with three labels, all are among three
            names = [f"{name}@{k}" for name in _SHOWN_METRICS for k in ks]
            shown = {name: self.metrics[name] for name in names if name in self.metrics} or self.metrics
            where = "held out, unseen in training" if self.split == HOLDOUT_SPLIT else f"split {self.split}"
            parts.append(
                f"Results on {self.tested:,} documents ({where}), in percent\n\n{format_metrics(shown, digits=1)}"
            )
        k = 5 if self.labels > 5 else 1
        if self.by_frequency and f"recall@{k}" in self.by_frequency[0]:
            parts.append(format_recall(self.by_frequency, k=k))
        parts.append(
            f"{self.folder}: {format_count(self.labels, 'label')}, trained on "
            f"{format_count(self.documents, 'document')}, {format_size(self.model_bytes)}, {self.seconds:.0f} s"
        )
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        metrics = f", P@1 {100 * self.metrics['P@1']:.1f} %" if "P@1" in self.metrics else ""
        return f"TrainReport({self.folder!r}, {self.labels:,} labels, {self.documents:,} documents{metrics})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The last expression of a cell of a notebook shows the tables."""
        printer.text(str(self))


def train(
    data: str | os.PathLike | Dataset | Mapping[str, Dataset],
    output_dir: str | os.PathLike,
    *,
    encoder: str | None = None,
    text_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    label_delimiter: str | None = None,
    encoding: str | None = None,
    separator: str | None = None,
    sheet: str | None = None,
    label_texts: bool | VocabularySource | None = None,
    label_language: str | Sequence[str] | None = None,
    labels_seen_only: bool = False,
    extend: str | os.PathLike | None = None,
    previous: str | os.PathLike | Dataset | Mapping[str, Dataset] | None = None,
    holdout: float = 0.1,
    final_train: bool = True,
    log: str = "text",
    **options: Any,
) -> tuple[XMCForTextClassification, TrainReport]:
    """
    Trains a model on a file and measures it.

    Columns and separators are found by looking at the data. Without validation and test splits, a random tenth of the
    documents is held out: a first model is trained on the others and measured on this tenth, then the model that is
    kept is trained on all documents.

    Args:
        data (`str`, `datasets.Dataset`, `dict[str, datasets.Dataset]` or `pandas.DataFrame`):
            A file (csv, tsv, parquet, jsonl, json, xlsx), a folder, the id of a dataset on the Hub, or loaded data.
        output_dir (`str`):
            Folder of the model.
        encoder (`str`, *optional*):
            Folder or Hub id of a transformer encoder to fine-tune.
        text_column (`str` or `Sequence[str]`, *optional*):
            Column of the texts, or several, such as `["title", "abstract"]`, joined with line breaks.
            `tfidf_lead_words=-1` gives the words of the first one features of their own.
        label_column (`str`, *optional*):
            Column of the labels.
        label_delimiter (`str`, *optional*):
            Separator of the labels in a column of strings; `""` for one label in each row.
        encoding (`str`, *optional*):
            Encoding of a csv file.
        separator (`str`, *optional*):
            Separator of the columns of a csv file.
        sheet (`str`, *optional*):
            Sheet of an Excel file.
        label_texts (`str`, `os.PathLike`, `Mapping` or `bool`, *optional*):
            Names and descriptions of the labels: a [`LabelVocabulary`], a dictionary, or what [`load_vocabulary`]
            loads. By default, or with `True`, the file `labels.parquet` (or csv, ttl and so on) in the folder of
            the data. `False` does without texts, even where the labels are words themselves.
        label_language (`str` or `Sequence[str]`, *optional*):
            Language of the names in a SKOS file, see [`load_vocabulary`].
        labels_seen_only (`bool`, *optional*, defaults to `False`):
            Whether to leave out labels of the vocabulary that no document has.
        extend (`str`, *optional*):
            Folder or Hub id of a trained model, which stays as it is: the new model is this one, extended by `data`.
        previous (`str`, `datasets.Dataset` or `dict[str, datasets.Dataset]`, *optional*):
            The data that the model of `extend` was trained on; of several splits, `train`.
        holdout (`float`, *optional*, defaults to 0.1):
            Share of the documents to hold out, at most 10,000 of them, if the data has no other splits. 0 for none.
        final_train (`bool`, *optional*, defaults to `True`):
            Whether to train on all documents at the end. If not, the model never sees the documents held out.
        log (`str`, *optional*, defaults to `"text"`):
            What is printed: `"text"` for a line per stage, `"json"` for JSON lines, `"none"`.
        options:
            Options of [`XMCTrainingArguments`], such as `method`, `ranker_beam_size` or `num_train_epochs`.

    Returns:
        `tuple[XMCForTextClassification, TrainReport]`: the model, which is also in `output_dir`, and its report.

    Example:

    ```python
    model, report = hf_xmc.train("tickets.csv", "my-tagger")
    print(report)
    model.predict(["The printer on floor 3 is jammed"], top_k=3)
    ```
    """
    _check_options(options)
    _check_folder(str(output_dir), options)
    if not 0 <= holdout < 1:
        raise ValueError(f"`holdout={holdout}` must be at least 0 and below 1: the share of documents to hold out.")
    check_extension(extend, previous)
    progress = StageProgressCallback(log, bar=False if options.get("disable_tqdm") else None)
    columns: dict[str, Any] = {
        "text_column": text_column,
        "label_column": label_column,
        "label_delimiter": label_delimiter,
        "encoding": encoding,
        "separator": separator,
        "sheet": sheet,
        "known": None if extend is None else TrainingRecord.load(extend).columns,
    }
    if encoder is not None:
        options["encoder_name"] = encoder
    options["method"] = options.get("method") or "auto"
    processes = ProcessGroup.current()
    if not processes.is_main:
        progress.silence()
    with quiet_libraries(), closing(progress):
        progress.begin_stage("reading")
        with processes.main_first():
            found = load_documents(data, **columns)
        vocabulary = vocabulary_beside(found.name, label_texts, label_language)
        extended = _extended_model(extend, previous, columns)
        run = _Run(found, str(output_dir), options, vocabulary, labels_seen_only, extended, progress, processes)
        held_out = run.hold_out(holdout)
        if processes.is_main:
            _show_data(found, held_out, progress)
        return run.train(held_out, final_train)


@dataclass
class _Run:
    """The trainings of one call of [`train`]."""

    found: Documents
    folder: str
    options: dict[str, Any]
    label_texts: LabelVocabulary | Literal[False] | None
    labels_seen_only: bool
    extended: dict[str, Any]
    progress: StageProgressCallback
    processes: ProcessGroup
    seconds: float = 0.0

    def hold_out(self, share: float) -> int:
        """Number of documents to hold out."""
        documents = len(self.found.splits["train"])
        if len(self.found.splits) > 1 or share == 0 or documents < _MIN_DOCUMENTS:
            return 0
        return max(1, min(int(share * documents), _MAX_HELD_OUT))

    def train(self, held_out: int, final_train: bool) -> tuple[XMCForTextClassification, TrainReport]:
        """Trains once or twice, evaluates, and reports."""
        splits = self.found.splits
        documents, validation = splits["train"], splits.get("validation")
        split: str | None = next((name for name in ("test", "validation") if name in splits), None)
        tested = None if split is None else splits[split]
        if held_out:
            seed = self.options.get("seed") or 42
            parts = documents.train_test_split(test_size=held_out, seed=seed)
            # One half chooses the weights of the last scorer, the other is measured.
            halves = parts["test"].train_test_split(test_size=0.5, shuffle=False) if held_out > 1 else parts
            split, tested, validation = HOLDOUT_SPLIT, halves["test"], halves["train"] if held_out > 1 else None
            if len(documents) < _MANY and _labels_of(parts["train"]).isdisjoint(_labels_of(tested)):
                self.progress.note("No label of the documents held out is one of the others: nothing can be measured.")
                held_out, split, tested, validation = 0, None, None, None
            if not final_train:
                documents = parts["train"]
        evaluation: dict[str, Any] | None = None
        scorer: Scorer | None = None
        if held_out and final_train:
            folder = os.path.join(self.folder, _HOLDOUT_FOLDER)
            self.progress.use_span(0.0, 0.47)
            first = self._fit(folder, parts["train"], validation, again=True)
            evaluation = self._evaluate(first, tested, split)
            self.progress.use_span(0.47, 1.0)
            self.progress.note("Once more, with all documents:")
            validation, scorer = None, first.model.scorer
            del first
        trainer = self._fit(self.folder, documents, validation, scorer=scorer)
        if evaluation is None and tested is not None:
            evaluation = self._evaluate(trainer, tested, split)
        elif evaluation is not None:
            evaluation = {**evaluation, "split": f"{HOLDOUT_SPLIT}, before the training on all documents"}
            trainer.recorder.record.add_evaluation(evaluation)
        trainer.create_model_card()
        if self.processes.is_main:
            shutil.rmtree(os.path.join(self.folder, _HOLDOUT_FOLDER), ignore_errors=True)
        if trainer.args.push_to_hub:
            trainer.push_to_hub()
        report = self._report(trainer, split, evaluation)
        if self.progress.log == "json":
            names = ("folder", "labels", "documents", "model_bytes", "seconds", "split", "tested", "metrics")
            results = {name: getattr(report, name) for name in (*names, "by_frequency")}
            self.progress.write(json.dumps({"report": results}))
        trainer.end()
        return trainer.model, report

    def _fit(
        self,
        folder: str,
        documents: Dataset,
        validation: Dataset | None,
        again: bool = False,
        scorer: Scorer | None = None,
    ) -> XMCTrainer:
        options = {**self.options, "push_to_hub": False, "overwrite": True} if again else self.options
        columns = self.found.columns
        texts = [columns.text, *columns.more_texts] if columns else []
        args = XMCTrainingArguments(folder, **options)
        if options["method"] == "auto" and scorer is None and not self.extended:
            self.progress.note(f"{'method':<20}{args.method}: {args.method_reason}")
        trainer = XMCTrainer(
            args=args,
            train_dataset=documents,
            eval_dataset=validation,
            label_texts=self.label_texts,
            labels_seen_only=self.labels_seen_only,
            callbacks=[self.progress],
            **self.extended,
        )
        trainer.scorer = scorer
        trainer.model.config.text_columns = texts if len(texts) > 1 else None
        record = trainer.recorder.record
        record.dataset, record.split = public_name(self.found.name), "train"
        record.columns = asdict(columns) if columns else None
        resume = self.options.get("resume_from_checkpoint")
        output = trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
        self.seconds += output.metrics.get("train_runtime", 0.0)
        return trainer

    def _evaluate(self, trainer: XMCTrainer, dataset: Dataset | None, split: str | None) -> dict[str, Any]:
        assert dataset is not None and split is not None
        self.progress.begin_stage("evaluate")
        trainer.evaluate(dataset, metric_key_prefix=split)
        return trainer.recorder.record.evaluations[-1]

    def _report(self, trainer: XMCTrainer, split: str | None, evaluation: dict[str, Any] | None) -> TrainReport:
        results: dict[str, Any] = {}
        if evaluation is not None:
            results = {"split": split, "tested": evaluation["documents"], "metrics": evaluation["metrics"]}
            results["by_frequency"] = evaluation.get("by_frequency", [])
        labels = trainer.model.checked_labels()
        size = sum(path.stat().st_size for path in Path(self.folder).rglob("*") if path.is_file())
        return TrainReport(self.folder, labels.num_documents, len(labels), size, self.seconds, self.found, **results)


def _check_folder(folder: str, options: Mapping[str, Any]) -> None:
    """Refuses now, and not after the first training, to overwrite a model or a file."""
    for path in (Path(folder), *Path(folder).parents):
        if path.is_file():
            raise NotADirectoryError(f"`output_dir`: `{path}` is a file. Choose a folder for the model (`--output`).")
    if os.path.exists(os.path.join(folder, CONFIG_NAME)):
        if not options.get("overwrite") and not options.get("resume_from_checkpoint"):
            raise FileExistsError(
                f"`{folder}` contains a finished model. Choose another folder, or replace it with `overwrite=True` "
                "(`--overwrite`)."
            )


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises for names that are not options, before any data is read."""
    known = {declared.name for declared in fields(XMCTrainingArguments) if declared.init}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *inspect.signature(train).parameters], n=1)
            hint = f" Did you mean `{close[0]}`?" if close else ""
            raise TypeError(explain_old_name(name) or f"`{name}` is not an option of `train`.{hint}")


def _labels_of(dataset: Dataset) -> set[Any]:
    return {label for labels in dataset["labels"] for label in labels}


def _extended_model(extend: Any, previous: Any, columns: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the trainer for a model to extend."""
    if extend is None:
        return {}
    return {"model": extend, "previous_dataset": load_documents(previous, **columns).splits["train"]}


def _show_data(found: Documents, held_out: int, progress: StageProgressCallback) -> None:
    """Prints what was found in the data, with the options that change it."""
    counts, columns = found.counts.get("train"), found.columns
    documents = {name: len(dataset) for name, dataset in found.splits.items()}
    if progress.log == "json":
        shown = {"data": public_name(found.name), "documents": documents, "held_out": held_out}
        facts = {"columns": asdict(columns) if columns else None, "rows": asdict(counts) if counts else None}
        progress.write(json.dumps({**shown, **facts, "encoding": found.encoding, "separator": found.separator}))
        return
    rows = format_count(counts.rows, "row") if counts else format_count(documents["train"], "document")
    lines: list[tuple[str, str, str]] = []
    if found.encoding is not None:
        form = f"{rows}, {found.encoding}, separated by {found.separator!r}"
        lines.append((Path(str(found.name)).name, form, "--encoding, --separator"))
    else:
        lines.append((public_name(found.name) or "data", rows, ""))
    if columns is not None:
        lines += _column_lines(columns)
    if counts is not None and counts.documents < counts.rows:
        left_out = {"without text": counts.empty, "without labels": counts.unlabelled}
        facts_ = [f"{count:,} {what}" for what, count in left_out.items() if count]
        if facts_:
            lines.append(("  left out", f"rows: {', '.join(facts_)}", ""))
        if counts.repeated:
            rows = format_count(counts.repeated, "row")
            lines.append(("  joined", f"{rows} with a text or id that occurred before", ""))
    if len(documents) > 1:
        lines.append(("  splits", ", ".join(f"{name} {count:,}" for name, count in documents.items()), ""))
    elif held_out:
        use = "half to tune, half to measure" if held_out > 1 else "to measure"
        lines.append(("  held out", f"{held_out:,} of {documents['train']:,}: {use}", "--holdout"))
    else:
        few = f": {documents['train']} are too few to measure on" if documents["train"] < _MIN_DOCUMENTS else ""
        lines.append(("  held out", f"none{few}", "" if few else "--holdout"))
    for name, what, option in lines:
        gap = " " if len(what) <= 36 else "  "
        progress.write(f"{name:<20}{what:<36}{gap}{option}".rstrip())


def _column_lines(columns: FoundColumns) -> list[tuple[str, str, str]]:
    """What is printed about columns: name, what was found, option."""
    how = {"lists": "lists", "JSON lists": "lists in brackets", "one each": "one in each row"}
    form = how.get(columns.format) or f"separated by {columns.delimiter!r}"
    texts = [f"`{name}`" for name in (columns.text, *columns.more_texts)]
    lines = [
        ("  text", f"column{'s'[: len(texts) - 1]} {', '.join(texts)}", "--text-column"),
        ("  labels", f"column `{columns.labels}`", "--label-column"),
        ("", form, "--label-delimiter"),
    ]
    unused = [f"`{name}`" for name in columns.others if name != columns.id]
    if unused:
        more = f" and {len(unused) - _MAX_UNUSED} more" if len(unused) > _MAX_UNUSED else ""
        lines.append(("  not used", ", ".join(unused[:_MAX_UNUSED]) + more, ""))
    return lines
