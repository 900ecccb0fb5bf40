import logging

import numpy as np
import pytest
from conftest import refused
from datasets import ClassLabel, Dataset, DatasetDict, Features, LargeList, List, Sequence, Value

from hf_xmc.data import feature_matrix, prepare_dataset


def test_leaves_right_columns_alone():
    dataset = Dataset.from_dict({"id": [1, 2], "text": ["a", ""], "labels": [["x"], []]})
    prepared = prepare_dataset(dataset)
    assert prepared.column_names == ["text", "labels"]
    assert prepared["text"][:] == ["a", ""] and prepared["labels"][:] == [["x"], []]
    assert prepare_dataset(prepared)[:] == prepared[:]


def test_column_mapping():
    dataset = Dataset.from_dict({"title": ["a"], "text": ["body"], "tags": [[1, 2]]})
    prepared = prepare_dataset(dataset, {"title": "text", "tags": "labels"})
    assert prepared[:] == {"text": ["a"], "labels": [[1, 2]]}
    swapped = prepare_dataset(dataset, {"title": "text", "text": "labels"}, label_delimiter=" ")
    assert swapped[:] == {"text": ["a"], "labels": [["body"]]}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"titel": "text"}, "`titel`.*title, tags.*`title`"),
        ({"title": "txt"}, "`txt`.*text, feature_ids"),
        ({"text": "title"}, "{'title': 'text'}"),
        ({"title": "text", "tags": "text"}, "`title`, `tags`.*`text`"),
        ({"title": "text"}, r"no column `labels`.*column_mapping="),
        ({"tags": "labels"}, r"no column `text`.*its columns are title, labels"),
    ],
)
def test_wrong_column_names(mapping, message):
    refused(message, prepare_dataset, Dataset.from_dict({"title": ["a"], "tags": [["x"]]}), mapping)


@pytest.mark.parametrize("container", [List, LargeList, Sequence])
def test_class_labels_become_names(container):
    features = Features({"text": Value("string"), "labels": container(ClassLabel(names=["x\ty", "z"]))})
    rows = [[1, 0], [], [0]]
    dataset = Dataset.from_dict({"text": ["a", "b", "c"], "labels": rows}, features=features)
    prepared = prepare_dataset(dataset.select([2, 1, 0]))
    assert prepared[:] == {"text": ["c", "b", "a"], "labels": [["x\ty"], [], ["z", "x\ty"]]}


def test_delimited_strings():
    dataset = Dataset.from_dict({"text": list("abcde"), "labels": ["x|y z", " x | x", "", None, "|"]})
    prepared = prepare_dataset(dataset, label_delimiter="|")
    assert prepared["labels"][:] == [["x", "y z"], ["x", "x"], [], [], []]
    assert prepared["text"][:] == list("abcde")
    assert prepare_dataset(dataset.with_format("numpy"), label_delimiter="|")["labels"][0] == ["x", "y z"]
    refused(r"such as 'x\|y z'.*label_delimiter", prepare_dataset, dataset)


def test_one_number_per_row_with_delimiter():
    # A CSV file of documents with one label each gives a column of numbers.
    dataset = Dataset.from_dict({"text": ["a", "b"], "labels": [7, 8]})
    assert prepare_dataset(dataset, label_delimiter=",")["labels"][:] == [["7"], ["8"]]


def test_missing_text_is_empty():
    dataset = Dataset.from_dict({"text": ["a", None], "labels": [["x"], ["y"]]})
    assert prepare_dataset(dataset)["text"][:] == ["a", ""]
    nothing = Dataset.from_dict({"text": [None, None], "labels": [["x"], ["y"]]})
    assert prepare_dataset(nothing)["text"][:] == ["", ""]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": [1], "labels": [["x"]]}, "Column `text` is of type int64"),
        ({"text": [["a"]], "labels": [["x"]]}, "Column `text` is of type list"),
        ({"text": ["a"], "labels": [[1.5]]}, "Column `labels` is of type list<item: double>"),
        ({"text": ["a"], "labels": [1.5]}, "Column `labels` is of type double"),
        ({"text": ["a"], "labels": [[["x"]]]}, "Column `labels` is of type list<item: list"),
        ({"feature_ids": [[0.5]], "feature_values": [[1.0]], "labels": [["x"]]}, "`feature_ids` is of type"),
        ({"feature_ids": [[0]], "feature_values": [["1"]], "labels": [["x"]]}, "`feature_values` is of type"),
    ],
)
def test_wrong_types(columns, message):
    refused(message, prepare_dataset, Dataset.from_dict(columns), error=TypeError)


def test_no_documents_columns_or_dataset():
    with pytest.raises(ValueError, match=r'column_mapping={"label": "labels"}'):
        prepare_dataset(Dataset.from_dict({"text": ["a"], "label": [["x"]]}))
    features = Features({"text": Value("string"), "labels": List(Value("string"))})
    refused("empty", prepare_dataset, Dataset.from_dict({"text": [], "labels": []}, features=features))
    refused("Dataset", prepare_dataset, DatasetDict(), error=TypeError)


def vectors(ids, values, id_type="int32", value_type="float32"):
    features = Features({"feature_ids": List(Value(id_type)), "feature_values": List(Value(value_type))})
    return Dataset.from_dict({"feature_ids": ids, "feature_values": values}, features=features)


@pytest.mark.parametrize(
    ("id_type", "value_type"), [("int32", "float32"), ("int64", "float64"), ("uint16", "float32")]
)
def test_feature_matrix(monkeypatch, id_type, value_type):
    monkeypatch.setattr("hf_xmc.data.columns._BATCH_SIZE", 2)
    # Row 0 is unsorted, row 1 empty, row 2 missing; row 3 starts where row 0 ended.
    dataset = vectors([[5, 0, 2], [], None, [2, 5]], [[1.0, 2.0, 3.0], [], None, [4.0, 5.0]], id_type, value_type)
    matrix = feature_matrix(dataset)
    assert matrix.shape == (4, 6) and matrix.dtype == np.float32 and matrix.has_canonical_format
    expected = np.zeros((4, 6))
    expected[0, [5, 0, 2]], expected[3, [2, 5]] = [1, 2, 3], [4, 5]
    assert np.array_equal(matrix.toarray(), expected)
    assert np.array_equal(feature_matrix(dataset.select([3, 0])).toarray(), expected[[3, 0]])
    assert feature_matrix(dataset, num_features=9).shape == (4, 9)


def test_features_beyond_the_model_are_left_out(caplog):
    dataset = vectors([[1, 3], [9], [0]], [[1.0, 2.0], [3.0], [4.0]])
    with caplog.at_level(logging.WARNING):
        matrix = feature_matrix(dataset, num_features=3)
    assert matrix.toarray().tolist() == [[0, 1, 0], [0, 0, 0], [4, 0, 0]]
    assert "2 of 4 feature values have an id of 3 or more" in caplog.text


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([[0], [1, 3, 1]], [[1.0], [1.0, 2.0, 3.0]], "Row 1.*feature 1"),
        ([[0], [1, 1]], [[1.0], [1.0, 2.0]], "Row 1.*feature 1"),
        ([[0], [], [2, -4]], [[1.0], [], [1.0, 2.0]], "Row 2.*-4"),
        ([[0], [1]], [[1.0], [float("nan")]], "Row 1.*nan"),
        ([[0, 8], [1]], [[1.0, float("-inf")], [1.0]], "Row 0.*-inf"),
        ([[0], [1]], [[1.0], [1e300]], "Row 1.*inf"),
        ([[0], [1, 2]], [[1.0], [1.0]], "Row 1.*2 .*1 "),
        ([[0], [None]], [[1.0], [1.0]], "Row 1.*feature id"),
        ([[0], [1]], [[1.0], [None]], "Row 1.*feature value"),
        ([[0], [2**40]], [[1.0], [1.0]], "Row 1.*feature id"),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 100])
def test_bad_vectors_name_their_row(monkeypatch, ids, values, message, batch_size):
    monkeypatch.setattr("hf_xmc.data.columns._BATCH_SIZE", batch_size)
    refused(message, feature_matrix, vectors(ids, values, "int64", "float64"))


def test_feature_matrix_needs_its_columns():
    refused("`feature_ids`", feature_matrix, Dataset.from_dict({"text": ["a"]}))
    assert feature_matrix(vectors([[], []], [[], []])).shape == (2, 1)
