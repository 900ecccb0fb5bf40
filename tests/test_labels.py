import ast
from pathlib import Path

import numpy as np
import pytest
from conftest import refused
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

import hf_xmc.label_columns
from hf_xmc.labels import Labels

ROWS = [["b", "a"], [], ["c"], ["a", "a", "b", "a"], ["c", "b"]]


def make(rows, item="string"):
    return Dataset.from_dict({"labels": rows}, features=Features({"labels": List(Value(item))}))


def slow_matrix(rows, columns):
    matrix = np.zeros((len(rows), len(columns)), np.float32)
    for i, row in enumerate(rows):
        for label in row:
            if str(label) in columns:
                matrix[i, columns.index(str(label))] = 1
    return matrix


def random_rows(seed, num_rows=500, num_labels=60):
    rng = np.random.default_rng(seed)
    return [[f"l{i}" for i in rng.integers(0, num_labels, rng.integers(0, 6))] for _ in range(num_rows)]


def test_collects_and_counts():
    labels = Labels.from_dataset(make(ROWS))
    assert labels.names == ["a", "b", "c"] and len(labels) == 3 and labels[1] == "b"
    # "a" three times in one document counts once; the document without labels counts as a document.
    assert labels.counts.tolist() == [2, 3, 2] and labels.counts.dtype == np.int64
    assert labels.num_documents == 5 and labels.texts is None


@pytest.mark.parametrize("batch_size", [1, 7, 200_000])
def test_encode_equals_slow_version(monkeypatch, batch_size):
    monkeypatch.setattr(hf_xmc.label_columns, "BATCH_SIZE", batch_size)
    train, test = random_rows(0), random_rows(1, num_labels=90)
    labels = Labels.from_dataset(make(train))
    expected = slow_matrix(train, labels.names)
    encoded = labels.encode(make(train))
    assert np.array_equal(encoded.toarray(), expected) and encoded.dtype == np.float32
    assert encoded.has_canonical_format and (encoded.data == 1).all()
    assert np.array_equal(labels.counts, expected.sum(axis=0))

    seen = labels.encode(make(test))
    assert seen.shape == (500, len(labels))
    assert np.array_equal(seen.toarray(), slow_matrix(test, labels.names))
    unseen = list(dict.fromkeys(label for row in test for label in row if label not in labels.names))
    every = labels.encode(make(test), keep_unseen=True)
    assert np.array_equal(every.toarray(), slow_matrix(test, labels.names + unseen))


def test_shuffled_and_selected_datasets():
    rows = random_rows(2)
    dataset = make(rows).shuffle(seed=3).select(range(100))
    labels = Labels.from_dataset(make(rows))
    assert np.array_equal(labels.encode(dataset).toarray(), slow_matrix(dataset["labels"], labels.names))


def test_types_of_labels():
    for item in ("int32", "int64", "uint8"):  # sorted by number
        labels = Labels.from_dataset(make([[10, 9], [100], [9]], item))
        assert labels.names == ["9", "10", "100"] and labels.counts.tolist() == [2, 1, 1]
        encoded = labels.encode(make([[100, 7], [7, 8]], item), keep_unseen=True)
        assert encoded.toarray().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    features = Features({"labels": List(ClassLabel(names=["cat", "ant"]))})
    labels = Labels.from_dataset(Dataset.from_dict({"labels": [[0, 1], [1]]}, features=features))
    assert labels.names == ["ant", "cat"] and labels.counts.tolist() == [2, 1]
    outside = Dataset.from_dict({"labels": [[0], [1, -1]]}, features=features)
    refused("Row 1.*-1.*`labels`", Labels.from_dataset, outside)
    for item in ("large_string", "string"):  # a missing list is a document without labels
        labels = Labels.from_dataset(make([["a"], None, []], item))
        assert labels.num_documents == 3 and labels.encode(make([None, ["a"]], item)).toarray().tolist() == [[0], [1]]


def test_given_names_keep_their_order():
    labels = Labels.from_dataset(make(ROWS), names=["c", "z", "b", "a"], texts={"a": "first", "z": "last"})
    assert labels.names == ["c", "z", "b", "a"] and labels.counts.tolist() == [2, 0, 3, 2]
    assert labels.texts == ["", "last", "", "first"]
    refused("names.*'b'.*row 0", Labels.from_dataset, make(ROWS), names=["a", "c"])


def test_ids():
    labels = Labels.from_dataset(make(ROWS))
    assert labels.ids(["c", "nothing", "a"]).tolist() == [2, -1, 0]
    assert labels.ids([]).shape == (0,)


def test_file_keeps_strange_names(tmp_path):
    names = [
        "two\nlines",
        "tab\tbed",
        "x" * 10_000,
        '“quoted”, \\ and "plain"',
        "\u2028 separator",
        "日本語",
        " blank ",
        "null",
    ]
    rows = [[name] for name in names] + [names]
    labels = Labels.from_dataset(make(rows), texts=dict(zip(names, reversed(names), strict=True)))
    labels.save_pretrained(tmp_path)
    loaded = Labels.from_pretrained(tmp_path)
    assert loaded.names == sorted(names) and loaded.texts == labels.texts
    assert loaded.counts.tolist() == [2] * 8 and loaded.counts.dtype == np.int64 and loaded.num_documents == 9
    assert np.array_equal(loaded.encode(make(rows)).toarray(), slow_matrix(rows, loaded.names))
    assert [path.name for path in tmp_path.iterdir()] == ["labels.json"]


@pytest.mark.parametrize(
    "content",
    ["{}", "[1]", '{"names": ["a", "a"], "counts": [1, 1], "num_documents": 2}', '{"names": ["a"], "counts"'],
)
def test_missing_and_damaged_files(tmp_path, content):
    refused(r"labels\.json", Labels.from_pretrained, tmp_path, error=FileNotFoundError)
    (tmp_path / "labels.json").write_text(content)
    refused(r"labels\.json", Labels.from_pretrained, tmp_path)


@pytest.mark.parametrize(
    ("names", "counts", "documents", "texts", "message"),
    [
        ([], None, 0, None, "names"),
        (["a", "b", "a"], None, 0, None, "'a'"),
        (["a", ""], None, 0, None, r"names\[1\]"),
        (["a", 3], None, 0, None, r"names\[1\]"),
        (["a"], [1, 2], 3, None, "counts"),
        (["a"], [-1], 3, None, "counts"),
        (["a"], [4], 3, None, "num_documents"),
        (["a"], [1], 3, ["x", "y"], "texts"),
    ],
)
def test_checks(names, counts, documents, texts, message):
    refused(message, Labels, names, counts, documents, texts)


@pytest.mark.parametrize(("rows", "row"), [([["a"], ["b", None]], 1), ([["a"], [], ["b", ""]], 2)])
def test_empty_labels_name_their_row(rows, row):
    refused(f"Row {row}.*labels", Labels.from_dataset, make(rows))


def test_wrong_columns_and_types():
    refused("labels.*tags", Labels.from_dataset, Dataset.from_dict({"tags": [["a"]]}))
    refused("labels.*double", Labels.from_dataset, make([[1.5]], "float64"), error=TypeError)
    refused("labels", Labels.from_dataset, Dataset.from_dict({"labels": ["a b"]}), error=TypeError)
    refused("DatasetDict", Labels.from_dataset, DatasetDict({"train": make(ROWS)}), error=TypeError)
    for rows in ([], [[], []], [None, []]):
        refused("column `labels`", Labels.from_dataset, make(rows))


def test_empty_dataset_encodes_to_no_rows():
    assert Labels(["a", "b"]).encode(make([])).shape == (0, 2)


def test_shipped_file_requires_no_training_libraries():
    # transformers requires every package imported by a model's code, unless the import stands in a `try` block.
    tree = ast.parse(Path(hf_xmc.labels.__file__).read_text())
    inside_try = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    imported = set()
    for node in ast.walk(tree):
        if id(node) in inside_try:
            continue
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module.split(".")[0])
    assert not imported & {"datasets", "pyarrow"}
