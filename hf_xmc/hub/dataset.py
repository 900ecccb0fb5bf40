"""Uploads of datasets: the splits, the labels with their texts, and a card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict
from huggingface_hub import DatasetCard, DatasetCardData, hf_hub_download

from ..configuration_xmc import TASK
from ..labels import Labels
from ..vocabulary import LabelVocabulary
from .model_card import CARD_FILE, CardOptions
from .upload import Destination, attempt, create_repo, upload

CARD_TEMPLATE = Path(__file__).with_name("dataset_card_template.md")
LABELS_FILE = "labels.parquet"


def push_dataset(
    splits: Mapping[str, Dataset],
    destination: Destination,
    label_texts: Mapping[str, Any] | None = None,
    options: CardOptions | None = None,
) -> Any:
    """
    Uploads a dataset with `DatasetDict.push_to_hub`, then its labels (with counts and texts) and a card.

    `load_xmc_dataset(repo_id)` and `datasets.load_dataset(repo_id)` load it. The splits have the columns of
    [`prepare_dataset`], `label_texts` are what [`LabelVocabulary`] takes. Returns the last commit.
    """
    labels = _label_table(splits, label_texts or {})
    repo_id = create_repo(destination)
    target: dict[str, Any] = {"token": destination.token, "revision": destination.revision}
    target |= {"commit_message": destination.commit_message, "create_pr": destination.create_pr}
    data = attempt(lambda: DatasetDict(splits).push_to_hub(repo_id, **target), destination, "The dataset")

    def stage(folder: str) -> None:
        pq.write_table(labels, Path(folder, LABELS_FILE))
        # The commit of the data has written the configuration of the splits into the card.
        path = hf_hub_download(
            repo_id, CARD_FILE, repo_type="dataset", revision=data.pr_revision or data.oid, token=destination.token
        )
        card = render_dataset_card(DatasetCard.load(path), repo_id, splits, len(labels), options or CardOptions())
        Path(folder, CARD_FILE).write_text(card, encoding="utf-8")

    if data.pr_revision is not None:
        destination = Destination(repo_id, "dataset", token=destination.token, revision=data.pr_revision)
    destination.commit_message = "Upload labels and card"
    done = upload(stage, destination, "The dataset")
    done.pr_url = done.pr_url or data.pr_url
    return done


def _label_table(splits: Mapping[str, Dataset], texts: Mapping[str, Any]) -> pa.Table:
    """Returns the labels of all splits, what is known about them and their counts in the training split."""
    names = sorted(set().union(*(Labels.from_dataset(split).names for split in splits.values())))
    train = Labels.from_dataset(splits.get("train") or next(iter(splits.values())))
    counts = dict(zip(train.names, train.counts.tolist(), strict=True))
    labels = Labels(names)
    labels.describe(LabelVocabulary(texts).for_labels(names))
    columns: dict[str, Any] = {"label": names, "text": labels.texts}
    parents = None if labels.parents is None else [[names[i] for i in own] for own in labels.parents]
    known = {"synonyms": labels.synonyms, "description": labels.descriptions, "parents": parents}
    columns |= {name: values for name, values in known.items() if values is not None}
    return pa.table({**columns, "train_count": [counts.get(name, 0) for name in names]})


def render_dataset_card(
    card: DatasetCard, repo_id: str, splits: Mapping[str, Dataset], num_labels: int, options: CardOptions
) -> str:
    """Renders the card of a dataset; the metadata of the existing card is kept."""
    metadata = {
        "language": options.language,
        "license": options.license,
        "pretty_name": repo_id.split("/")[-1],
        "task_categories": ["text-classification"],
        "task_ids": ["multi-label-classification"],
        "tags": ["hf-xmc", TASK, *options.tags],
    }
    metadata = {name: value for name, value in metadata.items() if value is not None}
    rows = [
        {
            "name": name,
            "documents": len(split),
            "mean": float(np.mean([len(labels) for labels in split["labels"]])) if len(split) else 0.0,
            "columns": ", ".join(split.column_names),
        }
        for name, split in splits.items()
    ]
    rendered = DatasetCard.from_template(
        DatasetCardData(**{**card.data.to_dict(), **metadata}),
        template_path=str(CARD_TEMPLATE),
        repo_id=repo_id,
        splits=rows,
        num_labels=num_labels,
        labels_file=LABELS_FILE,
    )
    return f"{rendered.content.rstrip()}\n"
