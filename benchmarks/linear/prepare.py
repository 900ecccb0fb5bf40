"""Makes the vectors and label matrices which every system of a benchmark shares.

A work folder holds ``X.<split>.npz`` and ``Y.<split>.npz`` (CSR, float32, sorted indices, uncompressed) for the splits
``trn``, ``tst`` and, where there is one, ``dev``; ``labels.json`` (id to name); and ``info.json``.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import scipy.sparse as sp

from .venvs import python_of

TOKEN = re.compile(r"(?u)\w\w+")
SPLITS = {"trn": "train", "tst": "test", "dev": "dev"}


def prepare(
    data: Path,
    work: Path,
    *,
    train: str = "train",
    normalise: bool = False,
    stemmer: str | None = None,
    threads: int = 2,
) -> dict[str, Any]:
    """Writes the features of one dataset.

    Args:
        data (`Path`):
            Folder with ``train.parquet``, ``test.parquet`` and maybe ``dev.parquet`` (columns ``text``, ``labels``),
            or with ``train.txt.gz`` and ``test.txt.gz`` in the format of the Extreme Classification Repository.
        work (`Path`):
            Folder to write to.
        train (`str`, *optional*, defaults to `"train"`):
            Name of the training file without its ending, for subsets such as ``train-15k``.
        normalise (`bool`, *optional*, defaults to `False`):
            Scale the rows of given vectors to length 1. TF-IDF rows have that length anyway.
        stemmer (`str`, *optional*):
            Language of a Snowball stemmer. The vectors then are those that Annif passes to omikuji, see `_fit_stems`.
        threads (`int`, *optional*, defaults to `2`):
            Threads of the TF-IDF.

    Returns:
        `dict`: the content of ``info.json``.
    """
    work.mkdir(parents=True, exist_ok=True)
    files = {split: train if split == "trn" else name for split, name in SPLITS.items()}
    if (data / f"{train}.parquet").is_file():
        info = _prepare_texts(data, work, files, threads, stemmer)
    elif (data / f"{train}.txt.gz").is_file():
        info = _prepare_vectors(data, work, files, normalise)
    else:
        raise FileNotFoundError(
            f"{data} holds neither {train}.parquet nor {train}.txt.gz; name the training file with --train."
        )
    info = {"data": data.name, "train_file": train, **info, **describe(work)}
    write_json(work / "info.json", info)
    return info


def load_matrix(work: Path, name: str) -> sp.csr_matrix:
    """Loads one of the matrices of a work folder."""
    path = work / f"{name}.npz"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: run `python -m benchmarks.linear prepare DATA {work}` first.")
    return sp.csr_matrix(sp.load_npz(path))


def describe(work: Path) -> dict[str, Any]:
    """Counts documents, labels, features and non-zeros of a work folder."""
    features, labels, truth = (load_matrix(work, name) for name in ("X.trn", "Y.trn", "Y.tst"))
    return {
        "train_documents": features.shape[0],
        "test_documents": truth.shape[0],
        "features": features.shape[1],
        "labels": labels.shape[1],
        "labels_with_training_documents": int(
            np.count_nonzero(np.bincount(labels.indices, minlength=labels.shape[1]))
        ),
        "labels_with_those_of_test_only": truth.shape[1],
        "nonzeros_per_document": features.nnz / features.shape[0],
        "labels_per_document": labels.nnz / labels.shape[0],
    }


def _prepare_texts(data: Path, work: Path, files: dict[str, str], threads: int, stemmer: str | None) -> dict[str, Any]:
    paths = {split: data / f"{name}.parquet" for split, name in files.items()}
    splits = [split for split, path in paths.items() if path.is_file()]
    if "tst" not in splits:
        raise FileNotFoundError(f"{paths['tst']} is missing: the benchmark needs a test split.")
    names: dict[str, int] = {}
    texts: dict[str, list[str]] = {}
    start = time.perf_counter()
    for split in splits:
        table = pq.read_table(paths[split], columns=["text", "labels"])
        rows = [[str(label) for label in row] for row in table["labels"].to_pylist()]
        # Training labels sorted first; labels which only other splits have follow, beyond the columns of training.
        seen = {label for row in rows for label in row}
        for label in sorted(seen) if split == "trn" else (label for row in rows for label in row):
            names.setdefault(label, len(names))
        _save(work / f"Y.{split}.npz", label_matrix(([names[label] for label in row] for row in rows), len(names)))
        texts[split] = table["text"].to_pylist()
        if stemmer is not None:
            continue
        with open(work / f"{split}.tokens", "w", encoding="utf-8", newline="\n") as file:
            for text in texts[split]:
                file.write(" ".join(TOKEN.findall(text.lower())) + "\n")
    tokens_s = time.perf_counter() - start
    write_json(work / "labels.json", list(names))
    if stemmer is not None:
        return _fit_stems(texts, work, stemmer)
    worker = Path(__file__).with_name("tfidf_pecos.py")
    command = [str(python_of("pecos")), str(worker), str(work), str(threads), *splits]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    for split in splits:
        (work / f"{split}.tokens").unlink()
    return {"vectors": "PECOS TF-IDF", "tokens_s": tokens_s, **json.loads(output.splitlines()[-1])}


def _fit_stems(texts: dict[str, list[str]], work: Path, stemmer: str) -> dict[str, Any]:
    """The features of Annif with its analyzer `snowball`: stems of words of three or more characters with a letter."""
    import Stemmer
    from sklearn.feature_extraction.text import TfidfVectorizer

    stem = Stemmer.Stemmer(stemmer).stemWords
    word = re.compile(r"\w*[^\W\d_]\w*")

    def analyze(text: str) -> list[str]:
        return stem([token for token in word.findall(text.lower()) if len(token) > 2])

    start = time.perf_counter()
    vectorizer = TfidfVectorizer(analyzer=analyze, sublinear_tf=True, dtype=np.float32).fit(texts["trn"])
    for split, documents in texts.items():
        _save(work / f"X.{split}.npz", sp.csr_matrix(vectorizer.transform(documents)))
    return {"vectors": f"Snowball stems ({stemmer}), min_df=1", "tfidf_s": time.perf_counter() - start}


def _prepare_vectors(data: Path, work: Path, files: dict[str, str], normalise: bool) -> dict[str, Any]:
    for split, name in files.items():
        path = data / f"{name}.txt.gz"
        if path.is_file():
            features, labels = read_repository_file(path)
            if normalise:
                features = normalise_rows(features)
            _save(work / f"X.{split}.npz", features)
            _save(work / f"Y.{split}.npz", labels)
    return {"vectors": "as given, rows scaled to length 1" if normalise else "as given"}


def read_repository_file(path: Path) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Reads a gzipped file of the Extreme Classification Repository: a header, then ``l1,l2 f:v f:v`` per document."""
    rows: list[list[int]] = []
    ids, values, ends = [], [], [0]
    with gzip.open(path, "rt", encoding="ascii") as file:
        documents, num_features, num_labels = (int(number) for number in file.readline().split())
        for line in file:
            # A line of a document without labels starts with a blank.
            label_part, _, feature_part = line.rstrip("\n").partition(" ")
            rows.append([int(label) for label in label_part.split(",") if label])
            for pair in feature_part.split():
                index, value = pair.split(":")
                ids.append(int(index))
                values.append(float(value))
            ends.append(len(ids))
    if len(rows) != documents:
        raise ValueError(
            f"{path} announces {documents} documents in its header but holds {len(rows)}; get the file again."
        )
    shape = (documents, num_features)
    features = sp.csr_matrix((np.array(values, np.float32), np.array(ids, np.int32), np.array(ends, np.int64)), shape)
    return features, label_matrix(rows, num_labels)


def normalise_rows(matrix: sp.csr_matrix) -> sp.csr_matrix:
    """Scales rows to length 1; empty rows stay as they are."""
    lengths = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1), np.float64).ravel())
    scale = np.divide(1.0, lengths, out=np.ones_like(lengths), where=lengths > 0)
    data = matrix.data * np.repeat(scale, np.diff(matrix.indptr))
    return sp.csr_matrix((data.astype(np.float32), matrix.indices, matrix.indptr), matrix.shape)


def label_matrix(rows: Iterable[list[int]], num_labels: int) -> sp.csr_matrix:
    """Makes a binary matrix of label ids, a label repeated in a row counting once."""
    ids, ends = [], [0]
    for row in rows:
        ids.extend(sorted(set(row)))
        ends.append(len(ids))
    data = np.ones(len(ids), np.float32)
    return sp.csr_matrix((data, np.array(ids, np.int32), np.array(ends, np.int64)), (len(ends) - 1, num_labels))


def _save(path: Path, matrix: sp.csr_matrix) -> None:
    matrix.sort_indices()
    # int32 throughout: PECOS 1.2.8 and napkinXC copy or refuse 64-bit offsets.
    matrix.indptr, matrix.indices = matrix.indptr.astype(np.int32), matrix.indices.astype(np.int32)
    temporary = path.with_suffix(".tmp.npz")
    sp.save_npz(temporary, matrix, compressed=False)
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """Reads a JSON file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: `prepare` makes info.json, `run` makes the files in runs/.")
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    os.replace(temporary, path)
