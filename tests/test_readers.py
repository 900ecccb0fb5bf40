from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import refused
from datasets import Dataset, DatasetDict
from scipy.sparse import csc_matrix, csr_matrix, random, save_npz

import hf_xmc.data.formats
import hf_xmc.data.streams
from hf_xmc.data import feature_matrix, load_label_texts, load_xmc_dataset
from hf_xmc.labels import Labels


@pytest.fixture
def load(tmp_path_factory):
    """Reads with an Arrow cache of the test's own."""
    cache_dir = str(tmp_path_factory.mktemp("cache"))
    return lambda path, split=None, **options: load_xmc_dataset(path, split, cache_dir=cache_dir, **options)


def write_gz(path, content: bytes):
    path.write_bytes(gzip.compress(content))
    return path


# Tables


def test_parquet_folder(tmp_path, load):
    for name, text in (("train", "a"), ("dev", "b"), ("test", "c"), ("train-5k", "no"), ("labels", "no")):
        Dataset.from_dict({"text": [text], "labels": [["x", "y"]]}).to_parquet(tmp_path / f"{name}.parquet")
    splits = load(tmp_path)
    assert isinstance(splits, DatasetDict) and list(splits) == ["train", "validation", "test"]
    assert {name: split["text"][0] for name, split in splits.items()} == {"train": "a", "validation": "b", "test": "c"}
    assert splits["train"].cache_files, "the dataset is memory-mapped"
    assert load(tmp_path, "dev")["text"][:] == ["b"] == load(tmp_path, "validation")["text"][:]
    assert load(tmp_path / "train-5k.parquet")["text"][:] == ["no"]


def test_splits_that_are_read_as_one(tmp_path, load):
    for name, text in (("train", "a"), ("dev", "b"), ("train-5k", "c")):
        Dataset.from_dict({"text": [text], "labels": [["x"]]}).to_parquet(tmp_path / f"{name}.parquet")
    Dataset.from_dict({"text": ["d"], "labels": [[7]]}).to_parquet(tmp_path / "test.parquet")
    assert load(tmp_path, "train+dev")["text"][:] == ["a", "b"]
    assert load(tmp_path, "validation + train-5k + train")["text"][:] == ["b", "c", "a"]
    refused("`train-9k`", load, tmp_path, "train+train-9k")
    for wrong in ("train+train", "dev+validation", "train+", "+"):
        refused("train", load, tmp_path, wrong)
    refused("train and test", load, tmp_path, "train+test")
    refused("train", load, tmp_path / "train.parquet", "train+dev")


def test_shards_in_a_data_folder(tmp_path, load):
    (tmp_path / "data").mkdir()
    for i in range(2):
        path = tmp_path / "data" / f"train-0000{i}-of-00002.parquet"
        Dataset.from_dict({"text": [str(i)], "labels": [[i]]}).to_parquet(path)
    assert load(tmp_path)["train"][:] == {"text": ["0", "1"], "labels": [[0], [1]]}


@pytest.mark.parametrize("zipped", [False, True])
def test_jsonl(tmp_path, load, zipped):
    rows = [{"title": "two\nlines", "target_ind": [3, 4]}, {"title": "", "target_ind": []}]
    content = "\n".join(json.dumps(row) for row in rows).encode()
    write_gz(tmp_path / "trn.json.gz", content) if zipped else (tmp_path / "trn.jsonl").write_bytes(content)
    splits = load(tmp_path, column_mapping={"title": "text", "target_ind": "labels"})
    assert splits["train"][:] == {"text": ["two\nlines", ""], "labels": [[3, 4], []]}


def test_csv_and_tsv(tmp_path, load):
    (tmp_path / "train.csv").write_text('text,labels\n"a, b",x;y\nNA,null\n,\n')
    dataset = load(tmp_path / "train.csv", label_delimiter=";")
    assert dataset[:] == {"text": ["a, b", "NA", ""], "labels": [["x", "y"], ["null"], []]}
    (tmp_path / "test.tsv").write_text("text\tlabels\na, b\t1 2\n")
    assert load(tmp_path / "test.tsv", "test", label_delimiter=" ")[:] == {"text": ["a, b"], "labels": [["1", "2"]]}
    (tmp_path / "odd.csv").write_text("text#labels\na#1\n")
    assert load(tmp_path / "odd.csv", label_delimiter=" ", sep="#")[:] == {"text": ["a"], "labels": [["1"]]}


def test_texts_that_are_not_utf8(tmp_path, load):
    rows = {"text": pa.array([b"solar", b"so\xc3lar"], pa.binary()), "labels": [["a"], ["b"]]}
    table = pa.table(rows)
    # As other programs write it: Arrow itself would refuse to make such texts.
    table = table.set_column(0, "text", table["text"].chunk(0).view(pa.string()))
    pq.write_table(table, tmp_path / "train.parquet")
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "so\xc3lar", "labels": ["a"]}\n')
    for name in ("train.parquet", "train.jsonl"):
        refused(name, load, tmp_path / name)


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl", "train.csv", "train.txt", "train.txt.gz"])
@pytest.mark.parametrize("content", [b"", b'{"text": "a", \x00\xff'], ids=["empty", "damaged"])
def test_empty_and_damaged_files(tmp_path, load, name, content):
    (tmp_path / name).write_bytes(content)
    refused(f"{name}`", load, tmp_path)


def test_what_cannot_be_found(tmp_path, load):
    (tmp_path / "notes.md").write_text("hello")
    refused(r"notes\.md", load, tmp_path, error=FileNotFoundError)
    refused("nowhere`", load, tmp_path / "nowhere", error=FileNotFoundError)
    refused("notes", load, tmp_path / "notes.md")
    Dataset.from_dict({"text": ["a"], "labels": [["x"]]}).to_parquet(tmp_path / "test.parquet")
    refused("`train`.*test", load, tmp_path, "train")
    refused("`test`.*`train`", load, tmp_path / "test.parquet", "train")
    other = tmp_path / "other"
    other.mkdir()
    (other / "valid_labels.txt").write_text("a\n")
    refused(r"`valid_texts\.txt`", load, other, error=FileNotFoundError)
    (other / "valid_labels.txt").unlink()
    for name in ("wiki_train.csv", "law_train.csv"):
        (other / name).write_text("text,labels\na,b\n")
    refused(r"`train`.*law_train\.csv, wiki_train\.csv", load, other)


def test_hub_names_that_do_not_exist(load, monkeypatch):
    from datasets.exceptions import DatasetNotFoundError

    def refuse(*args, **kwargs):
        raise DatasetNotFoundError("no such dataset")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    refused("Hub", load, "nobody/nothing", error=FileNotFoundError)


def test_hub_datasets(load, monkeypatch):
    loaded = DatasetDict({"dev": Dataset.from_dict({"title": ["a"], "labels": [["x"]]})})
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: loaded)
    assert load("some/data", "dev", column_mapping={"title": "text"})[:] == {"text": ["a"], "labels": [["x"]]}
    assert list(load("some/data", column_mapping={"title": "text"})) == ["validation"]


def test_label_texts(tmp_path):
    Dataset.from_dict({"label": ["p1", "p2"], "text": ["one", None]}).to_parquet(tmp_path / "labels.parquet")
    assert load_label_texts(tmp_path) == {"p1": "one", "p2": ""}
    refused("elsewhere`", load_label_texts, tmp_path / "elsewhere", error=FileNotFoundError)
    (tmp_path / "empty").mkdir()
    refused(r"labels\.parquet", load_label_texts, tmp_path / "empty", error=FileNotFoundError)


# Extreme Classification Repository

XMC = b"5 10 4\n3,1 0:0.5 7:2 9:1e-3\n 2:1.5\n0 \n2,2 8:1 3:-4\n4:1 5:2\n"


def test_xmc_text(tmp_path, load):
    (tmp_path / "wiki10_train.svm").write_bytes(XMC)
    write_gz(tmp_path / "test.txt.gz", XMC.replace(b"\n", b"\r\n"))
    splits = load(tmp_path)
    assert list(splits) == ["train", "test"]
    for split in splits.values():
        assert split.column_names == ["feature_ids", "feature_values", "labels"]
        assert split["labels"][:] == [[3, 1], [], [0], [2, 2], []]
        # The fourth document was not sorted.
        assert split["feature_ids"][:] == [[0, 7, 9], [2], [], [3, 8], [4, 5]]
        assert split["feature_values"][3] == [-4.0, 1.0] and split["feature_values"][0][2] == np.float32(1e-3)
    assert splits["train"].cache_files, "the dataset is memory-mapped"
    labels = Labels.from_dataset(splits["train"])
    assert (
        labels.names == ["0", "1", "2", "3"] and labels.counts.tolist() == [1, 1, 1, 1] and labels.num_documents == 5
    )


@pytest.mark.parametrize("block_bytes", [3, 64, 4 << 20])
def test_xmc_text_equals_slow_version(tmp_path, load, monkeypatch, block_bytes):
    monkeypatch.setattr(hf_xmc.data.streams, "BLOCK_BYTES", block_bytes)
    rng = np.random.default_rng(0)
    matrix = random(60, 40, 0.2, format="csr", random_state=rng, dtype=np.float32)
    labels = [list(rng.choice(9, rng.integers(0, 4), replace=False)) for _ in range(60)]
    lines = ["60 40 9"]
    for i, row in enumerate(labels):
        part = matrix[i]
        features = [f"{j}:{v:.9g}" for j, v in zip(part.indices, part.data, strict=True)]
        rng.shuffle(features)
        lines.append(" ".join([",".join(map(str, row)), *features]))
    # No newline at the end of the file.
    (tmp_path / "train.txt").write_text("\n".join(lines))
    dataset = load(tmp_path, "train")
    assert dataset["labels"][:] == labels
    assert np.array_equal(feature_matrix(dataset, 40).toarray(), matrix.toarray())


@pytest.mark.parametrize("line", [b"1,2\t3:1  4:2", b"1,2  3:1 4:2  \t", b"1,2 +3:1 4:2.0"])
def test_xmc_white_space(tmp_path, load, line):
    # A blank line is a document without labels and features; behind the last document it means nothing.
    (tmp_path / "train.txt").write_bytes(b"3 5 3\n" + line + b"\n\n0 1:1\n\n\n")
    dataset = load(tmp_path, "train")
    assert dataset["labels"][:] == [[1, 2], [], [0]] and dataset["feature_ids"][:] == [[3, 4], [], [1]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1,2 3:4\n", "line 1, is `1,2 3:4"),
        (b"2 5\n1 1:1\n", "line 1, is `2 5"),
        (b"3 5 3\n1 1:1\n2 2:1\n", ".*2 of the 3 documents"),
        (b"1 5 3\n1 1:1\n2 2:1\n", ".*1 documents"),
        (b"2 5 3\n", ".*documents"),
        (b"2 5 3\n1 1:1\n2 5:1\n", "line 3.*feature id 5"),
        (b"2 5 3\n1 1:1\n2 -1:1\n", "line 3.*-1"),
        (b"2 5 3\n1 1:1\n3 2:1\n", "line 3.*label 3"),
        (b"2 5 3\n1 1:1\n-1 2:1\n", "line 3.*label -1"),
        (b"2 5 3\n1 1:1\n2 2:1 3:1 2:1\n", "line 3.*feature 2"),
        (b"2 5 3\n1 1:1\n2 2:nan\n", "line 3.*nan"),
        (b"2 5 3\n1 1:inf\n2 2:1\n", "line 2.*inf"),
        (b"2 5 3\n1 1:1e39\n2 2:1\n", "line 2.*inf"),
        (b"2 5 3\n1 1:1\n2 2:x\n", "line 3"),
        (b"2 5 3\n1 1:1\n2 2\n", "line 3"),
        (b"2 5 3\n1 1:1\n1, 2 2:1\n", "line 3"),
        (b"2 5 3\n1 1:1\n1 2,2 2:1\n", "line 3"),
        (b"2 5 3\n1 1:1\n2 2:1:3 1 4:1\n", "line 3"),
        (b"2 5 3\n1 1:1\n2 2.5:1\n", "line 3"),
        (b"2 5 3\n1 1:1\n2 2: 3:1\n", "line 3"),
        (b"2 5 3\n1 1:1\n1,,2 2:1\n", "line 3"),
        (b"2 5 3\n1 1:1\n2 99999999999999999999:1\n", "lines 2 to 3"),
    ],
)
def test_bad_xmc_text(tmp_path, load, content, message):
    (tmp_path / "train.txt").write_bytes(content)
    refused(rf"train\.txt`,? {message}", load, tmp_path)


@pytest.mark.parametrize("name, share", [("txt", 0.1), ("txt", 0.999), ("jsonl", 0.5)])
def test_truncated_gz(tmp_path, load, name, share):
    rng = np.random.default_rng(0)
    lines = ["3000 5 9", *(f"{rng.integers(0, 9)} {rng.integers(0, 5)}:{rng.random()}" for _ in range(3000))]
    if name == "jsonl":
        lines = [json.dumps({"text": line, "labels": ["x"]}) for line in lines]
    content = gzip.compress("\n".join(lines).encode())
    (tmp_path / f"train.{name}.gz").write_bytes(content[: int(len(content) * share)])
    refused(rf"train\.{name}\.gz", load, tmp_path)


def test_changed_files_are_read_again(tmp_path, load):
    path = tmp_path / "train.txt"
    path.write_bytes(b"1 5 3\n1 1:1\n")
    assert load(path)["labels"][:] == [[1]]
    path.write_bytes(b"1 5 3\n2 1:1 2:1\n")
    assert load(path)["labels"][:] == [[2]]


def test_options_of_tables_do_not_fit_other_files(tmp_path, load):
    (tmp_path / "train.txt").write_bytes(XMC)
    refused("sep", load, tmp_path, sep=";", error=TypeError)
    refused("`title`", load, tmp_path, column_mapping={"title": "text"})


# PECOS


@pytest.fixture
def pecos(tmp_path):
    """A folder with vectors, texts and label names, and its matrices."""
    rng = np.random.default_rng(0)
    matrices = {}
    for short, size in (("trn", 30), ("tst", 7)):
        x = random(size, 20, 0.3, format="csr", random_state=rng, dtype=np.float32)
        y = csr_matrix((rng.random((size, 5)) < 0.4).astype(np.float32))
        save_npz(tmp_path / f"X.{short}.npz", x)
        save_npz(tmp_path / f"Y.{short}.npz", y, compressed=False)
        (tmp_path / f"X.{short}.txt").write_text("".join(f"text {i} \u2028 of {short}\n" for i in range(size)))
        matrices[short] = x, y
    return tmp_path, matrices


@pytest.mark.parametrize("entries", [10, 1 << 20])
def test_pecos(pecos, load, monkeypatch, entries):
    monkeypatch.setattr(hf_xmc.data.formats, "_ENTRIES_AT_ONCE", entries)
    folder, matrices = pecos
    splits = load(folder)
    assert list(splits) == ["train", "test"] and splits["train"].cache_files
    for split, short in (("train", "trn"), ("test", "tst")):
        x, y = matrices[short]
        dataset = splits[split]
        assert dataset.column_names == ["text", "feature_ids", "feature_values", "labels"]
        assert np.array_equal(feature_matrix(dataset, 20).toarray(), x.toarray())
        assert dataset["labels"][:] == [row.indices.tolist() for row in y]
        assert dataset["text"][3] == f"text 3 \u2028 of {short}"


def test_pecos_label_names(pecos, load):
    folder, matrices = pecos
    names = ["zero", "one", "tab\tbed", "three", "日本"]
    (folder / "output-items.txt").write_text("\n".join(names) + "\n")
    expected = [[names[i] for i in row.indices] for row in matrices["tst"][1]]
    assert load(folder, "test")["labels"][:] == expected
    assert load_label_texts(folder) == {name: name for name in names}
    # Two labels of one name: their numbers tell them apart.
    (folder / "output-items.txt").write_text("a\nb\na\nc\nd\n")
    assert load(folder, "test")["labels"][0] == matrices["tst"][1][0].indices.tolist()
    assert load_label_texts(folder) == {"0": "a", "1": "b", "2": "a", "3": "c", "4": "d"}
    (folder / "output-items.txt").write_text("a\nb\n")
    refused("2 labels.*5 columns", load, folder)


def test_pecos_variants(pecos, load):
    folder, matrices = pecos
    # Vectors in the folder of the published archives, unsorted; labels by columns, with a stored zero; no texts.
    x, y = matrices["tst"]
    (folder / "tfidf-attnxml").mkdir()
    for short in ("trn", "tst"):
        (folder / f"X.{short}.npz").unlink()
        (folder / f"X.{short}.txt").unlink()
    (folder / "Y.trn.npz").unlink()
    unsorted = x.copy()
    for start, stop in zip(x.indptr, x.indptr[1:], strict=False):
        unsorted.indices[start:stop] = x.indices[start:stop][::-1]
        unsorted.data[start:stop] = x.data[start:stop][::-1]
    save_npz(folder / "tfidf-attnxml" / "X.tst.npz", unsorted)
    columns = csc_matrix(y)
    columns.data[0] = 0
    save_npz(folder / "Y.tst.npz", columns)
    splits = load(folder)
    assert list(splits) == ["test"] and "text" not in splits["test"].column_names
    assert np.array_equal(feature_matrix(splits["test"], 20).toarray(), x.toarray())
    assert np.array_equal(
        Labels.from_dataset(splits["test"], names=list("01234")).encode(splits["test"]).toarray(), columns.toarray()
    )


def not_finite(x, value):
    x.data[x.indptr[4]] = value
    return x


REPEATED = csr_matrix((np.ones(4), np.array([0, 3, 1, 3]), np.array([0, 1] + [4] * 29)), shape=(30, 20))
WRONG_PECOS = {
    "rows": (lambda folder, x: save_npz(folder / "X.trn.npz", x[:-1]), r"X\.trn\.npz.*29.*Y\.trn\.npz.*30"),
    "few lines": (lambda folder, _: (folder / "X.trn.txt").write_text("text\n" * 29), r"X\.trn\.txt.*29.*30"),
    "many lines": (lambda folder, _: (folder / "X.trn.txt").write_text("text\n" * 31), r"X\.trn\.txt.*31.*30"),
    "nan": (lambda folder, x: save_npz(folder / "X.trn.npz", not_finite(x, np.nan)), r"X\.trn\.npz`, row 4.*nan"),
    "inf": (lambda folder, x: save_npz(folder / "X.trn.npz", not_finite(x, np.inf)), r"X\.trn\.npz`, row 4.*inf"),
    "repeated": (lambda folder, _: save_npz(folder / "X.trn.npz", REPEATED), r"X\.trn\.npz`, row 1.*feature 3"),
}


@pytest.mark.parametrize("kind", WRONG_PECOS)
def test_pecos_files_that_do_not_fit(pecos, load, kind):
    folder, matrices = pecos
    change, message = WRONG_PECOS[kind]
    change(folder, matrices["trn"][0].copy())
    refused(message, load, folder)


def test_damaged_pecos_files(pecos, load):
    folder, _ = pecos
    path = folder / "Y.trn.npz"

    def assert_refused():
        refused(r"Y\.trn\.npz`", load, folder)

    path.write_bytes(path.read_bytes()[:-100])
    assert_refused()
    np.savez(path, a=np.zeros(3))
    assert_refused()
    np.savez(path, format=b"csr", shape=[30, 5], indptr=np.arange(31), indices=np.zeros(3, int), data=np.ones(3))
    assert_refused()
    np.savez(path, format=np.array([{}], object))
    assert_refused()
    for name in ("X.trn.txt", "X.trn.npz"):
        (folder / name).unlink()
    refused(r"`X\.trn\.txt`.*`X\.trn\.npz`", load, folder, error=FileNotFoundError)


# Pairs of texts and labels


def test_pairs(tmp_path, load):
    (tmp_path / "train_texts.txt").write_text("tokenised\ntoo\nno\n")
    (tmp_path / "train_raw_texts.txt").write_text("As written,\u2028one line.\n\nThird\n")
    (tmp_path / "train_labels.txt").write_text("a b_c\n\nb_c  b_c")
    (tmp_path / "test_texts.txt").write_bytes(b"one\r\n")
    (tmp_path / "test_labels.txt").write_bytes(b"a\r\n")
    splits = load(tmp_path)
    assert list(splits) == ["train", "test"] and splits["train"].cache_files
    assert splits["train"]["text"][:] == ["As written,\u2028one line.", "", "Third"]
    assert splits["train"]["labels"][:] == [["a", "b_c"], [], ["b_c", "b_c"]]
    assert splits["test"][:] == {"text": ["one"], "labels": [["a"]]}
    (tmp_path / "test_labels.txt").write_text("a label, another\n")
    assert load(tmp_path, "test", label_delimiter=",")["labels"][:] == [["a label", "another"]]


@pytest.mark.parametrize(("texts", "labels"), [(3, 2), (2, 3), (25_000, 10_000), (10_000, 10_001)])
def test_pairs_must_have_equal_lines(tmp_path, load, texts, labels):
    (tmp_path / "train_texts.txt").write_text("t\n" * texts)
    (tmp_path / "train_labels.txt").write_text("l\n" * labels)
    refused(rf"train_texts\.txt` has {texts} lines, .*train_labels\.txt` has {labels}", load, tmp_path)


@pytest.mark.parametrize("name", ["missing.parquet", "missing.txt.gz", "some/where/missing"])
def test_a_missing_file_is_not_looked_for_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(f"`{name}`", load_xmc_dataset, name, error=FileNotFoundError)
