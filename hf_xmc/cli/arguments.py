"""Options of the commands: the data and the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, DatasetDict
from transformers import AutoModel
from transformers.utils import CONFIG_NAME

from ..data import load_sample, load_xmc_dataset
from ..data.documents import is_prepared_data, load_documents
from ..data.readers import join_splits, split_names
from ..data.vocabularies import vocabulary_beside
from ..modeling_utils import PredictMixin
from ..serialization import ENSEMBLE_FILE, read_json, resolve_file
from ..training.extension import check_extension
from ..training.options import option
from ..training.progress import LOGS, quiet_libraries
from ..training.record import TrainingRecord
from ..vocabulary import LabelVocabulary
from .parsers import parse_mapping

TABLE_OPTIONS = ("text_column", "label_column", "encoding", "separator", "sheet")


@dataclass
class DataArguments:
    """The data that a model is trained and measured on."""

    dataset: str | None = option(None, "Folder, file or Hub id of the data; `sample` is the bundled dataset.")
    column_mapping: dict | str | None = option(
        None, 'Columns of the data as JSON: {"title": "text", "subjects": "labels"}.'
    )
    text_column: list[str] | None = option(
        None,
        "Column of the texts; by default it is found by its name and its values. Several, such as `title abstract`, "
        "are joined.",
    )
    label_column: str | None = option(None, "Column of the labels; by default it is found by its name and its values.")
    label_delimiter: str | None = option(None, "Separator of labels in a string column; by default it is found.")
    encoding: str | None = option(None, "Encoding of a csv file; by default it is found.")
    separator: str | None = option(None, "Separator of the columns of a csv file; by default it is found.")
    sheet: str | None = option(None, "Sheet of an Excel file.")
    label_texts: str | None = option(
        None,
        "File of names, synonyms and parents of the labels: a table, JSON, SKOS. By default `labels.parquet` (or csv, "
        "ttl and so on) in the folder of the data; `false` for none.",
        nargs="?",
        const="true",
    )
    label_language: str | None = option(
        None, "Language of the names in a SKOS file; by default the only one, or `en`."
    )
    labels_seen_only: bool = option(False, "Leave out labels of the vocabulary that no training document has.")
    extend: str | None = option(None, "Trained model to extend by the documents; its folder stays as it is.")
    previous: str | None = option(None, "Data that the model of --extend was trained on.")
    train_split: str = option("train", "Split to train on, or several: train+validation.")
    validation_split: str | None = option(
        None, "Split for evaluation during training, early stopping and the last scorer."
    )
    eval_split: str | None = option(None, "Split to measure on after training.")
    holdout: float = option(0.1, "Share of the documents to hold out if `hf-xmc train DATA` gets data without splits.")
    final_train: bool = option(True, "Whether to train on the documents held out, too, after measuring.")
    log: str = option("text", "What is printed: a line per stage, JSON lines, nothing.", choices=LOGS)

    def __post_init__(self) -> None:
        if not self.dataset:
            raise ValueError(
                "The data is missing. Write `hf-xmc train FILE -o FOLDER`, give `--dataset PATH`, or write `dataset: "
                "...` in the recipe."
            )
        if isinstance(self.column_mapping, str):
            self.column_mapping = parse_mapping(self.column_mapping)
        for name in ("validation_split", "eval_split"):
            self._check_unseen(name)

    def load_label_texts(self) -> LabelVocabulary | Literal[False] | None:
        """Loads the vocabulary of the labels, see [`vocabulary_beside`]."""
        wanted = {"true": True, "false": False}.get(str(self.label_texts).lower(), self.label_texts)
        return vocabulary_beside(None if self.dataset == "sample" else self.dataset, wanted, self.label_language)

    def load_extended(self) -> dict[str, Any]:
        """Returns the arguments of the trainer for a model to extend."""
        check_extension(self.extend, self.previous)
        if self.extend is None or self.previous is None:
            return {}
        previous = load_split(self.previous, self.train_split, **data_options(self, self.extend))
        return {"model": self.extend, "previous_dataset": previous}

    def _check_unseen(self, option: str) -> None:
        """Refuses to measure on training documents."""
        split = getattr(self, option)
        shared = set(split_names(split)) & set(split_names(self.train_split)) if split else set()
        if shared:
            raise ValueError(
                f"`train_split: {self.train_split}` and `{option}: {split}` share {', '.join(sorted(shared))}. "
                f"Measure on documents that are not trained on; --{option} '' sets no split."
            )

    @property
    def texts(self) -> list[str]:
        """The columns of the texts, as far as they are given."""
        return [self.text_column] if isinstance(self.text_column, str) else list(self.text_column or ())

    def load(self, split: str) -> Dataset:
        """Loads one split."""
        assert self.dataset is not None and not isinstance(self.column_mapping, str)
        return load_split(self.dataset, split, **data_options(self))


def data_options(args: Any, model: str | None = None) -> dict[str, Any]:
    """The options of [`load_split`] among arguments, and the columns that a model was trained on."""
    options = {name: getattr(args, name) for name in ("column_mapping", "label_delimiter", *TABLE_OPTIONS)}
    return {**options, "known": None if model is None else recorded_columns(model)}


def recorded_columns(model: str) -> dict[str, Any]:
    """The columns of the data that a model was trained on, from its record; empty if it has none."""
    if not os.path.isdir(model):
        return {}
    ensemble = Path(model, ENSEMBLE_FILE)
    if ensemble.is_file():
        return read_json(ensemble).get("columns") or {}
    return TrainingRecord.load(model).columns or {}


def load_split(
    path: str,
    split: str | None,
    column_mapping: dict[str, str] | None = None,
    label_delimiter: str | None = None,
    **options: Any,
) -> Dataset:
    """
    Loads one split of a dataset with labels; `sample` is the bundled one.

    Columns that are not named are found, see [`load_documents`]. Its other arguments may be given.
    """
    if path == "sample":
        splits = load_sample()
        if column_mapping or label_delimiter:
            raise ValueError("`sample` takes no `column_mapping` and no `label_delimiter`.")
        names = split_names(str(split))
        if not set(names) <= set(splits):
            raise ValueError(f"The sample has no split `{split}`; it has {', '.join(splits)}.")
        return join_splits({name: splits[name] for name in names})
    if not column_mapping and (options.get("text_column") or not is_prepared_data(path, split)):
        found = load_documents(path, split, label_delimiter=label_delimiter, **options)
        return _only_split(path, found.splits)
    loaded = load_xmc_dataset(path, split, column_mapping=column_mapping, label_delimiter=label_delimiter)
    return _only_split(path, loaded) if isinstance(loaded, DatasetDict) else loaded


def _only_split(path: str, splits: Mapping[str, Dataset]) -> Dataset:
    if len(splits) > 1:
        raise ValueError(f"`{path}` has the splits {', '.join(splits)}. Choose one with `--split`.")
    (dataset,) = splits.values()
    return dataset


def check_output_folder(folder: str, overwrite: bool) -> None:
    """Refuses to replace a model unless told to."""
    if os.path.exists(os.path.join(folder, CONFIG_NAME)) and not overwrite:
        raise FileExistsError(
            f"`{folder}` contains a model already. Choose another `--output`, or give `--overwrite`."
        )


def load_model(name_or_path: str, dtype: str | None = None, **options: Any) -> Any:
    """Loads a trained model or ensemble from a folder or the Hub, in the given precision."""
    if not os.path.isdir(name_or_path) and name_or_path.count("/") != 1:
        raise FileNotFoundError(f"There is no model in `{name_or_path}`. Give its folder, or its Hub id `owner/name`.")
    resolve_file(name_or_path, CONFIG_NAME)
    with quiet_libraries():
        model = AutoModel.from_pretrained(name_or_path, **({} if dtype is None else {"dtype": dtype}), **options)
    if not isinstance(model, PredictMixin):
        raise ValueError(f"`{name_or_path}` is a {type(model).__name__}, not a model of hf_xmc.")
    return model
