"""Publishing data: the splits as parquet, the texts of the labels, a card."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from huggingface_hub import CommitOperationAdd, DatasetCard, DatasetCardData

from ..labels import Labels
from .card_data import CardOptions
from .push import Destination, commit

CARD_TEMPLATE = Path(__file__).with_name("dataset_card_template.md")
LABELS_FILE = "labels.parquet"


def push_dataset(
    splits: Mapping[str, Dataset],
    destination: Destination,
    label_texts: Mapping[str, str] | None = None,
    given: CardOptions | None = None,
) -> Any:
    """
    Uploads a dataset: one parquet file per split, the labels with their counts and texts, and a card.

    `load_xmc_dataset(repo_id)` and `datasets.load_dataset(repo_id)` read it again.

    Args:
        splits (`Mapping[str, datasets.Dataset]`):
            Documents by split, in the columns of [`prepare_dataset`].
        destination ([`Destination`]):
            Where to.
        label_texts (`Mapping[str, str]`, *optional*):
            Texts of the labels by name.
        given ([`CardOptions`], *optional*):
            Licence, language and tags of the card.
    """
    first = splits.get("train") or next(iter(splits.values()))
    # The labels of all splits, with their counts in the first.
    names = sorted(set().union(*(Labels.from_dataset(split).names for split in splits.values())))
    trained = Labels.from_dataset(first)
    counts = dict(zip(trained.names, trained.counts.tolist(), strict=True))
    table = {
        "label": names,
        "text": [(label_texts or {}).get(name, "") for name in names],
        "train_count": [counts.get(name, 0) for name in names],
    }
    with tempfile.TemporaryDirectory() as folder:
        additions = []
        for name, split in splits.items():
            path = Path(folder, f"{name}.parquet")
            split.to_parquet(path)
            additions.append(CommitOperationAdd(path.name, str(path)))
        pq.write_table(pa.table(table), Path(folder, LABELS_FILE))
        additions.append(CommitOperationAdd(LABELS_FILE, str(Path(folder, LABELS_FILE))))
        card = render_dataset_card(splits, destination.repo_id, names, given or CardOptions())
        additions.append(CommitOperationAdd("README.md", card.encode()))
        return commit(additions, destination, "The dataset")


def render_dataset_card(splits: Mapping[str, Dataset], repo_id: str, labels: list[str], given: CardOptions) -> str:
    """The card of a dataset as text."""
    configs = [{"split": name, "path": f"{name}.parquet"} for name in splits]
    data = DatasetCardData(
        language=given.language,
        license=given.license,
        pretty_name=repo_id.split("/")[-1],
        task_categories=["text-classification"],
        task_ids=["multi-label-classification"],
        tags=["hf-xmc", "extreme-text-classification", *given.tags],
        configs=[{"config_name": "default", "data_files": configs}],
    )
    facts = []
    for name, split in splits.items():
        sizes = Counter(len(row) for row in split["labels"])
        documents = len(split)
        mean = sum(size * count for size, count in sizes.items()) / max(documents, 1)
        facts.append({"name": name, "documents": documents, "mean": mean, "columns": ", ".join(split.column_names)})
    card = DatasetCard.from_template(
        data, template_path=str(CARD_TEMPLATE), repo_id=repo_id, splits=facts, labels=labels, labels_file=LABELS_FILE
    )
    return f"{card.content.rstrip()}\n"
