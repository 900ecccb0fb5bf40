"""Makes the sample set of the package from `yso-en`: `python scripts/make_sample.py SOURCE_FOLDER [TARGET_FOLDER]`.

SOURCE_FOLDER holds `train.parquet` and `test.parquet` (`text`, `labels` as ids), `labels.parquet` (`label`, `text`).
The same source always gives the same sample: documents are chosen by a hash of their text, labels by their counts.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hf_xmc.data.readers import SAMPLE_FOLDER
from hf_xmc.serialization import atomic_write

NUM_LABELS = 2_200
MIN_TRAIN_DOCUMENTS = 5
MIN_LABELS = 2
SIZES = {"train": 16_000, "validation": 2_000, "test": 2_000}

README = """# Sample: English library records and their subjects

{documents} titles and short descriptions of records of Finnish libraries, in English, each with {min_labels} or more
of {labels} subjects of the General Finnish Ontology (YSO). It is there to try the library in a minute or two, not to
compare methods.

| split | documents | labels per document | words per document |
|---|---|---|---|
{rows}

Every label has at least {min_documents} documents in `train` (median {median}, largest {largest}).
Columns: `text`, `labels` (list of names).

## Origin
Made by `scripts/make_sample.py` from `yso-en`, 656,142 English records of Finnish libraries with YSO subjects:

- the {wanted} most frequent subjects in `train` whose English name is theirs alone;
- documents with at least {min_labels} of these subjects, in the order of a hash of their text; their other subjects
  are left out;
- subjects with fewer than {min_documents} training documents are dropped and documents chosen again, until all have
  enough;
- `train` and `validation` come from the source's `train`, `test` from its `test`.

The source holds a capped number of records for each subject, so a record's subjects may be incomplete: precision is
a lower bound.

## Licences
- Records (column `text` and their assignment to subjects): CC0 1.0.
- Names of subjects (column `labels`): General Finnish Ontology YSO, <https://finto.fi/yso/en/>, copyright National
  Library of Finland, Semantic Computing Research Group (SeCo) and The Finnish Terminology Centre TSK, licensed under
  [CC BY 4.0](https://creativecommons.org/licenses/by/4.0/). Changes: a selection of English names, without identifiers
  and relations.
"""

Document = tuple[str, list[str]]


def read_split(path: Path, names: dict[str, str]) -> list[Document]:
    """Documents of a split with label names, in the order of a hash of their text."""
    table = pq.read_table(path, columns=["text", "labels"])
    documents = [
        (text, [names[label] for label in labels if label in names])
        for text, labels in zip(table["text"].to_pylist(), table["labels"].to_pylist(), strict=True)
    ]
    return sorted(documents, key=lambda document: hashlib.blake2b(document[0].encode(), digest_size=16).digest())


def unique_names(path: Path) -> dict[str, str]:
    """Label id → name, without labels that share their name with another."""
    table = pq.read_table(path, columns=["label", "text"])
    names = dict(zip(table["label"].to_pylist(), table["text"].to_pylist(), strict=True))
    occurrences = Counter(names.values())
    return {label: name for label, name in names.items() if name and occurrences[name] == 1}


def restrict(documents: list[Document], labels: set[str]) -> list[Document]:
    """Documents with enough of the given labels, which are sorted and the only ones kept."""
    kept = ((text, sorted(labels.intersection(names))) for text, names in documents if text.strip())
    return [(text, names) for text, names in kept if len(names) >= MIN_LABELS]


def choose(train: list[Document], test: list[Document]) -> dict[str, list[Document]]:
    """The documents of the sample's splits."""
    counts = Counter(name for _, names in train for name in set(names))
    ranking = sorted(counts, key=lambda name: (-counts[name], name))
    labels = set(ranking[:NUM_LABELS])
    while True:
        candidates = restrict(train, labels)
        chosen = candidates[: SIZES["train"]]
        counts = Counter(name for _, names in chosen for name in names)
        frequent = {name for name in labels if counts[name] >= MIN_TRAIN_DOCUMENTS}
        if frequent == labels:
            break
        labels = frequent
    held_out = candidates[SIZES["train"] : SIZES["train"] + SIZES["validation"]]
    return {"train": chosen, "validation": held_out, "test": restrict(test, labels)[: SIZES["test"]]}


def describe(splits: dict[str, list[Document]]) -> str:
    """Text of the sample's README."""
    counts = sorted(Counter(name for _, names in splits["train"] for name in names).values())
    rows = []
    for split, documents in splits.items():
        labels = sum(len(names) for _, names in documents) / len(documents)
        words = sum(len(text.split()) for text, _ in documents) / len(documents)
        rows.append(f"| {split} | {len(documents):,} | {labels:.2f} | {words:.1f} |")
    return README.format(
        documents=f"{sum(map(len, splits.values())):,}",
        labels=f"{len(counts):,}",
        wanted=f"{NUM_LABELS:,}",
        rows="\n".join(rows),
        min_labels=MIN_LABELS,
        min_documents=MIN_TRAIN_DOCUMENTS,
        median=counts[len(counts) // 2],
        largest=counts[-1],
    )


def main() -> None:
    """Writes the parquet files and the README of the sample."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?", default=SAMPLE_FOLDER)
    arguments = parser.parse_args()
    names = unique_names(arguments.source / "labels.parquet")
    train, test = (read_split(arguments.source / f"{split}.parquet", names) for split in ("train", "test"))
    splits = choose(train, test)
    schema = pa.schema({"text": pa.string(), "labels": pa.list_(pa.string())})
    for split, documents in splits.items():
        texts, labels = zip(*documents, strict=True)
        table = pa.table({"text": texts, "labels": labels}, schema=schema)
        with atomic_write(arguments.target / f"{split}.parquet") as path:
            pq.write_table(table, path, compression="zstd", compression_level=19)
    with atomic_write(arguments.target / "README.md") as path:
        Path(path).write_text(describe(splits), encoding="utf-8")


if __name__ == "__main__":
    main()
