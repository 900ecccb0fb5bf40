"""Files that people have: encodings, separators, columns and labels are found, or the error names the option."""

import csv
import json
from pathlib import Path

import pytest
from conftest import refused
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from hf_xmc.data.csv_format import find_csv_format
from hf_xmc.data.discovery import find_columns
from hf_xmc.data.documents import RowCounts, load_documents

LABELS = ("Zürich", "São Paulo", "Málaga", "Ostend")
# Combinations of few labels, as in real data, with texts that no other column resembles.
TEXT = 'Café number {}, with "quotes" and a\nsecond line; really'
ROWS = [(f"A-{number}", TEXT.format(number), [LABELS[number % 4], LABELS[(number // 4) % 4]]) for number in range(40)]
EXPECTED = [(text, list(dict.fromkeys(labels))) for _, text, labels in ROWS]


@pytest.fixture
def load(tmp_path):
    return lambda path, **options: load_documents(path, cache_dir=str(tmp_path / "cache"), **options)


def write(path, rows, header=("id", "text", "labels"), encoding="utf-8", separator=","):
    with open(path, "w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerows([header, *rows])
    return str(path)


def pairs(dataset):
    return [(row["text"], row["labels"]) for row in dataset]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252", "latin-1"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_encodings_and_separators(tmp_path, load, encoding, separator):
    rows = [(number, text, json.dumps(labels, ensure_ascii=False)) for number, text, labels in ROWS]
    found = load(write(tmp_path / "data.csv", rows, encoding=encoding, separator=separator))
    assert pairs(found.splits["train"]) == EXPECTED
    assert found.separator == separator and found.columns.id == "id"
    assert found.counts["train"] == RowCounts(rows=40)


@pytest.mark.parametrize(
    "join, format, delimiter",
    [
        (json.dumps, "JSON lists", None),
        (str, "JSON lists", None),  # as pandas writes lists
        ("|".join, "delimited", "|"),
        ("; ".join, "delimited", ";"),
        (";".join, "delimited", ";"),
        (", ".join, "delimited", ","),
        ("\n".join, "delimited", "\n"),
    ],
)
def test_labels_in_one_cell(tmp_path, load, join, format, delimiter):
    found = load(write(tmp_path / "data.csv", [(number, text, join(labels)) for number, text, labels in ROWS]))
    assert (found.columns.format, found.columns.delimiter) == (format, delimiter)
    assert pairs(found.splits["train"]) == EXPECTED


def test_commas_within_names_do_not_separate_labels():
    cities = ["Paris, France", "Lyon, France", "Rome, Italy", "Bern, Switzerland"]
    table = Dataset.from_dict({"text": [f"text {i}" for i in range(40)], "city": [cities[i % 4] for i in range(40)]})
    assert find_columns(table, label_column="city").format == "one each"
    both = table.map(lambda row: {"city": f"{row['city']}; Europe"})
    assert find_columns(both, label_column="city").delimiter == ";"


@pytest.mark.parametrize("rows", [3, 20, 60])
@pytest.mark.parametrize("separator", [", ", "; ", "|"])
def test_a_small_table_with_many_labels(rows, separator):
    labels = [[f"Label number {i}", f"shared {i % 7}", f"Other {i}"] for i in range(rows)]
    table = {"id": list(range(rows)), "title": [f"A text, {i}" for i in range(rows)]}
    found = find_columns(Dataset.from_dict({**table, "subjects": [separator.join(own) for own in labels]}))
    assert (found.text, found.labels, found.delimiter) == ("title", "subjects", separator.strip())


def test_a_subject_that_is_a_text_is_not_the_labels():
    rows = range(40)
    columns = {"subject": [f"Printer {i} jams" for i in rows], "body": [f"It jams {i} times." for i in rows]}
    found = find_columns(Dataset.from_dict({**columns, "team": [f"team {i % 3}" for i in rows]}))
    assert found.labels == "team"


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"label1": [f"a {i}" for i in range(30)], "label2": [f"b {i}" for i in range(30)]}, "label1, label2"),
        ({"toxic": ["0", "1"] * 15, "insult": ["1", "0"] * 15}, "toxic, insult have 0 and 1"),
    ],
)
def test_labels_in_several_columns(columns, message):
    table = Dataset.from_dict({"text": [f"some text {i}" for i in range(30)], **columns})
    with pytest.raises(ValueError, match=message):
        find_columns(table)


def test_data_frames(load):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": [row[1] for row in ROWS], "labels": ["|".join(row[2]) for row in ROWS]})
    assert pairs(load(frame).splits["train"]) == EXPECTED
    assert pairs(load(frame[::2]).splits["train"]) == EXPECTED[::2]  # its index is not a column
    with pytest.raises(TypeError, match="list"):
        load([{"text": "a", "labels": ["b"]}])


def test_codes_separated_by_spaces():
    codes = ["cs.CL", "cs.LG", "stat.ML", "math.PR"]
    rows = [" ".join({codes[i % 4], codes[(i // 4) % 4], codes[(i // 9) % 4]}) for i in range(60)]
    table = Dataset.from_dict({"abstract": [f"text {i}" for i in range(60)], "categories": rows})
    found = find_columns(table)
    assert (found.text, found.labels, found.delimiter) == ("abstract", "categories", " ")


def test_one_label_in_each_row(tmp_path, load):
    rows = [(number, text, label) for number, text, labels in ROWS for label in labels]
    found = load(write(tmp_path / "data.csv", rows, header=("id", "body", "tag")))
    assert pairs(found.splits["train"]) == EXPECTED
    assert found.counts["train"] == RowCounts(rows=80, repeated=40)
    # The text only in the first row of an id.
    rows = [(number, text if i == 0 else "", label) for number, text, own in ROWS for i, label in enumerate(own)]
    found = load(write(tmp_path / "first.csv", rows, header=("id", "body", "tag")))
    assert pairs(found.splits["train"]) == EXPECTED


def test_rows_that_are_left_out(tmp_path, load):
    rows = [*ROWS, ("x", "", ["Ostend"]), ("y", "no labels", []), ("z", ROWS[0][1], ["new"])]
    found = load(write(tmp_path / "data.csv", [(number, text, "|".join(own)) for number, text, own in rows]))
    assert found.counts["train"] == RowCounts(rows=43, empty=1, unlabelled=1, repeated=1)
    assert found.counts["train"].documents == len(found.splits["train"]) == 40
    assert found.splits["train"][0]["labels"] == [*EXPECTED[0][1], "new"]


def test_numbers_stay_as_they_are_written(tmp_path, load):
    rows = [(i, f"some text {i}", f"00{i % 3}") for i in range(30)]
    found = load(write(tmp_path / "data.csv", rows, header=("", "description", "code")))
    assert found.columns.labels == "code" and found.splits["train"][1]["labels"] == ["001"]


@pytest.mark.parametrize(
    "columns, text, labels",
    [
        ({"id": "number", "subject": "long", "body": "text", "tags": "few"}, "body", "tags"),
        ({"Issue ID": "number", "Title": "long", "ProductCategory": "few"}, "Title", "ProductCategory"),
        ({"a": "number", "b": "text", "c": "few"}, "b", "c"),
        ({"text": "text", "label": "lists", "type": "few"}, "text", "label"),
    ],
)
def test_columns_are_found(columns, text, labels):
    makers = {
        "number": lambda i: f"{i}",
        "long": lambda i: f"about the matter {i}",
        "text": lambda i: f"a much longer text that says what the matter number {i} is about in detail",
        "few": lambda i: f"kind {i % 5}",
        "lists": lambda i: [f"kind {i % 5}", "all"],
    }
    table = Dataset.from_dict({name: [makers[kind](i) for i in range(50)] for name, kind in columns.items()})
    found = find_columns(table)
    assert (found.text, found.labels) == (text, labels)


def test_lists_and_classes(tmp_path, load):
    folder = tmp_path / "data"
    folder.mkdir()
    table = Dataset.from_dict({"title": [row[1] for row in ROWS], "subjects": [row[2] for row in ROWS]})
    table.to_parquet(folder / "export-2025.parquet")
    found = load(folder)  # the only table in a folder
    assert found.columns.format == "lists" and pairs(found.splits["train"]) == EXPECTED
    table.to_json(tmp_path / "data.jsonl")
    assert pairs(load(tmp_path / "data.jsonl").splits["train"]) == EXPECTED
    kinds = Features({"text": Value("string"), "labels": List(ClassLabel(names=["no", "yes"]))})
    classes = Dataset.from_dict({"text": ["a", "b"], "labels": [[0], [0, 1]]}, features=kinds)
    assert load(classes).splits["train"]["labels"][:] == [["no"], ["no", "yes"]]
    single = Dataset.from_dict(
        {"text": ["a", "b"], "label": [1, 0]},
        Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])}),
    )
    assert load(DatasetDict({"train": single})).splits["train"]["labels"][:] == [["yes"], ["no"]]
    # Datasets of the Hub mark documents without a class with -1.
    unlabelled = Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, -1, 0]}, single.features)
    found = load(unlabelled)
    assert found.splits["train"]["labels"][:] == [["yes"], ["no"]] and found.counts["train"].unlabelled == 1
    lists = Dataset.from_dict({"text": ["a", "b"], "labels": [[1, -1], [0]]}, features=kinds)
    assert load(lists).splits["train"]["labels"][:] == [["yes"], ["no"]]


def test_splits(load):
    table = Dataset.from_dict({"text": ["a", "b"], "labels": [["x"], ["y"]]})
    found = load({"train": table, "dev": table, "test": table})
    assert list(found.splits) == ["train", "validation", "test"]
    refused("train", load, {"one": table, "two": table})


def test_excel(tmp_path, load):
    openpyxl = pytest.importorskip("openpyxl")
    workbook = openpyxl.Workbook()
    sheet = workbook.active
    sheet.title = "2024"
    for row in [("id", "text", "tags"), *((number, text, "; ".join(own)) for number, text, own in ROWS)]:
        sheet.append(row)
    workbook.create_sheet("empty")
    workbook.save(tmp_path / "one.xlsx")
    assert pairs(load(tmp_path / "one.xlsx").splits["train"]) == EXPECTED
    second = workbook.create_sheet("2025")
    second.append(("text", "tags"))
    second.append(("seven", 7.0))
    workbook.save(tmp_path / "two.xlsx")
    refused("--sheet", load, tmp_path / "two.xlsx")
    assert pairs(load(tmp_path / "two.xlsx", sheet="2025").splits["train"]) == [("seven", ["7"])]
    refused("2026", load, tmp_path / "two.xlsx", sheet="2026")
    Path(tmp_path / "bad.xlsx").write_text("no zip")
    refused(r"bad\.xlsx", load, tmp_path / "bad.xlsx")


@pytest.mark.parametrize(
    "content, options, message",
    [
        ("foo,bar\nhello,3\nworld,4\n", {}, "label_column"),
        ("tags,first,second\nx,some words,more words\ny,some words,more words\n", {}, "text_column"),
        ("text,labels\na,x\n", {"text_column": "texts"}, "text_column"),
        ("How to repair an old printer,tag\nsomething,tag\n", {}, "text_column"),
        ("text,label1,label2\na,x,y\nb,x,\n", {}, "label1, label2"),
        ("text,labels\na,x\nb,y,z\n", {}, "line 3.*--separator"),
        ("text,text\na,x\n", {}, "line 1.*`text`"),
        ("text,labels\n,x\nb,\n", {}, "1 have nothing in `text`"),
        ("text,labels\na,x\n", {"encoding": "klingon"}, "klingon"),
        ("text,labels\na,x\n", {"sheet": "2025"}, "sheet"),
        ("text,labels\n" + 'a,"[1, 2]"\n' * 20 + "b,[oops\n", {}, "row 21, column `labels`"),
    ],
)
def test_what_cannot_be_read(tmp_path, load, content, options, message):
    path = tmp_path / "data.csv"
    path.write_text(content)
    refused(message, load, path, error=(ValueError, TypeError), **options)


def test_a_damaged_line_of_json(tmp_path, load):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a", "labels": ["b"]}\n\n{"text": "c",\n')
    with pytest.raises(ValueError, match="line 3"):
        load(path)


def test_a_table_with_a_line_of_excel(tmp_path, load):
    path = Path(write(tmp_path / "data.csv", [(n, t, "|".join(own)) for n, t, own in ROWS], separator=";"))
    for line in ("sep=;\r\n", '"sep=;"\n'):
        (tmp_path / "excel.csv").write_bytes(line.encode() + path.read_bytes())
        found = load(str(tmp_path / "excel.csv"))
        assert found.separator == ";" and pairs(found.splits["train"]) == EXPECTED


def test_one_damaged_character(tmp_path):
    good = "text,labels\n" + "Zürich,x\n" * 50
    path = tmp_path / "data.csv"
    path.write_bytes(good.encode() + b"Z\xfcrich,y\n")
    refused("line 52.*encoding", find_csv_format, path)
    assert find_csv_format(path, encoding="latin-1").columns == ("text", "labels")


def test_csv_options_do_not_fit_other_files(tmp_path, load):
    Dataset.from_dict({"text": ["a"], "labels": [["x"]]}).to_parquet(tmp_path / "data.parquet")
    refused("encoding", load, tmp_path / "data.parquet", encoding="utf-8")


def test_columns_of_earlier_data_are_used_where_they_fit(tmp_path, load):
    known = {"text": "summary", "labels": "kind", "format": "delimited", "delimiter": "/"}
    path = write(tmp_path / "a.csv", [("a", "b", "x/y")], header=("text", "summary", "kind"))
    assert pairs(load(path, known=known).splits["train"]) == [("b", ["x", "y"])]
    path = write(tmp_path / "b.csv", [("a", "x|y")], header=("text", "labels"))
    assert pairs(load(path, known=known).splits["train"]) == [("a", ["x", "y"])]
