"""
The models and data files that `fuzz_models.py` damages: `python tests/fuzz_subjects.py FOLDER` makes them.

It is a program of its own, so that the process that is forked for each mutation has not trained anything.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from conftest import NUM_LABELS, THREE_LEVELS, encoder_arguments, make_documents, save_tiny_encoder, train_linear
from scipy.sparse import csr_matrix, save_npz

from hf_xmc import XMCEnsemble, XMCForTextClassification, XMCTrainer
from hf_xmc.knn_ranker import KNNIndex, KNNRanker, KNNVectors
from hf_xmc.scorer import default_scorer
from hf_xmc.training.ensemble import make_ensemble

# For the labels of `make_documents`, which are codes here: all that a vocabulary can say, and a hierarchy.
VOCABULARY = {
    f"label {i:02d}": {
        "name": f"topic{i:02d}",
        "synonyms": [f"subject {i}", "matter"],
        "description": f"documents about word{i % 40:02d}",
        "parents": [f"label {i // 4:02d}"] if i else [],
    }
    for i in range(NUM_LABELS)
}


def make_models(folder: Path) -> None:
    """Trains a small model of each kind."""
    documents = make_documents(200)
    train_linear(folder / "linear", documents, **THREE_LEVELS)
    train_linear(folder / "linear-vocabulary", documents, label_texts=VOCABULARY, **THREE_LEVELS)
    train_linear(folder / "knn", documents, method="knn")
    train_linear(
        folder / "characters", documents, method="parabel", tfidf_analyzer="char_wb", tfidf_ngram_range=[2, 3]
    )
    encoder = folder / "encoder"
    save_tiny_encoder(encoder)
    for method in ("xr-transformer", "x-transformer", "lightxml", "aplc-xlnet"):
        args = encoder_arguments(folder / method, method=method, save_strategy="no", level_steps=[3])
        XMCTrainer(model=encoder, args=args, train_dataset=documents).train()
    args = encoder_arguments(
        folder / "label-texts", level_objective="label_texts", save_strategy="no", level_steps=[3]
    )
    XMCTrainer(model=encoder, args=args, train_dataset=documents, label_texts=VOCABULARY).train()
    shutil.rmtree(encoder)
    members = [folder / "linear", folder / "xr-transformer"]
    XMCEnsemble.from_members(members).save_pretrained(folder / "ensemble")
    make_ensemble(members, validation=make_documents(300, seed=5))[0].save_pretrained(folder / "ensemble-scorer")
    for name in ("linear", "xr-transformer"):
        model = XMCForTextClassification.from_pretrained(folder / name)
        model.save_pretrained(folder / f"{name}-sharded", max_shard_size=20_000)
    model = XMCForTextClassification.from_pretrained(folder / "linear-vocabulary")
    model.add_labels({"label 60": "topic05 topic06", "label 61": "topic07"}, {"label 60": ["topic05 word01"]})
    model.remove_labels(["label 17"])
    model.rename_labels({"label 33": "label 99"})
    model.save_pretrained(folder / "linear-edited")
    _add_neighbours(XMCForTextClassification.from_pretrained(members[1])).save_pretrained(folder / "neighbours")


def _add_neighbours(model: Any) -> Any:
    """Adds both indices of similar documents to a model with an encoder."""
    documents = make_documents(50, seed=3)
    features, labels = model.featurize(documents["text"]), model.labels.encode(documents)
    columns = features.sparse.tocsc()
    begin, ids = labels.indptr.astype(np.int64), labels.indices.astype(np.int32)
    index = KNNIndex(columns.indptr.astype(np.int64), columns.indices.astype(np.int32), columns.data, begin, ids)
    model.knn = KNNRanker(model.label_tree, index)
    model.knn_vectors = KNNVectors(features.dense.astype(np.float16), begin, ids, len(model.labels))
    model.scorer = default_scorer(model.available_parts)
    return model


def make_data(folder: Path) -> None:
    """Writes a small dataset in each format that is read."""
    documents = make_documents(30)
    names = sorted({name for labels in documents["labels"] for name in labels})
    for name in ("parquet", "jsonl", "csv", "xmc", "pecos", "pair"):
        (folder / name).mkdir(parents=True)
    documents.to_parquet(folder / "parquet" / "train.parquet")
    documents.to_json(folder / "jsonl" / "train.jsonl")
    joined = documents.map(lambda row: {"labels": ";".join(row["labels"])}, features=None)
    joined.to_csv(folder / "csv" / "train.csv")
    ids = [[names.index(name) for name in labels] for labels in documents["labels"]]
    lines = [",".join(map(str, row)) + " 0:0.5 3:1.25 7:2" for row in ids]
    (folder / "xmc" / "train.txt").write_text(f"{len(ids)} 10 {len(names)}\n" + "\n".join(lines) + "\n")
    ends = np.cumsum([0, *map(len, ids)])
    targets = csr_matrix((np.ones(ends[-1], np.float32), np.concatenate(ids), ends), shape=(len(ids), len(names)))
    save_npz(folder / "pecos" / "Y.trn.npz", targets, compressed=False)
    save_npz(folder / "pecos" / "X.trn.npz", targets * 2, compressed=False)
    (folder / "pecos" / "output-items.txt").write_text("\n".join(names) + "\n")
    (folder / "pair" / "train_texts.txt").write_text("\n".join(documents["text"]) + "\n")
    (folder / "pair" / "train_labels.txt").write_text("\n".join(" ".join(map(str, row)) for row in ids) + "\n")


def make_vocabularies(folder: Path) -> None:
    """Writes a small label vocabulary in each text format that is read."""
    names = [f"name {i}" for i in range(30)]
    rows = [
        {"label": f"l{i}", "text": name, "synonyms": [f"{name} a", "b"], "parents": [f"l{i // 3}"] if i else []}
        for i, name in enumerate(names)
    ]
    prefixes = "@prefix s: <http://www.w3.org/2004/02/skos/core#> .\n@prefix t: <http://t.org/> .\n"
    turtle = [
        f't:{row["label"]} a s:Concept ; s:prefLabel "{row["text"]}"@en, "nimi {i}"@fi'
        + "".join(f" ; s:broader t:{parent}" for parent in row["parents"])
        for i, row in enumerate(rows)
    ]
    xml = [
        f'<s:Concept r:about="http://t.org/{row["label"]}"><s:prefLabel xml:lang="en">{row["text"]}</s:prefLabel>'
        + "".join(f'<s:broader r:resource="http://t.org/{parent}"/>' for parent in row["parents"])
        + "</s:Concept>"
        for row in rows
    ]
    spaces = 'xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:s="http://www.w3.org/2004/02/skos/core#"'
    lines = [f"{row['label']},{row['text']},{'; '.join(row['synonyms'])},{'|'.join(row['parents'])}" for row in rows]
    contents = {
        "vocabulary-csv": ("labels.csv", "\n".join(["label,text,synonyms,parents", *lines])),
        "vocabulary-jsonl": ("labels.jsonl", "\n".join(map(json.dumps, rows))),
        "vocabulary-annif": ("labels.tsv", "\n".join(f"<http://t.org/{row['label']}>\t{row['text']}" for row in rows)),
        "skos-turtle": ("labels.ttl", prefixes + " .\n".join(turtle) + " .\n"),
        "skos-xml": ("labels.rdf", f"<r:RDF {spaces}>\n" + "\n".join(xml) + "\n</r:RDF>\n"),
    }
    for kind, (name, text) in contents.items():
        (folder / kind).mkdir(parents=True)
        (folder / kind / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    for make in (make_models, make_data, make_vocabularies):
        make(Path(sys.argv[1], make.__name__.removeprefix("make_")))
