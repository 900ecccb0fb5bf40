"""Finds texts and labels in a table by looking at names and values of its columns."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

TEXT_NAMES = (
    "text texts document documents body content contents fulltext abstract description message comment review "
    "question summary sentence headline title name"
).split()
LABEL_NAMES = (
    "labels label tags tag subjects categories category topics topic keywords keyword classes class codes code "
    "targets target genres genre products skills subject intent queue type"
).split()
# A column with one of these names has labels even if they hardly ever repeat, as in a small table.
_SURE_NAMES = "labels label tags subjects categories topics keywords classes targets genres".split()
_ID_NAMES = ("id", "ids", "uuid", "guid", "key", "index", "identifier", "number", "unnamed")
# These hardly ever occur within a name. A comma separates labels only if the values show it.
_CERTAIN_DELIMITERS = "|;\n\t"
_SAMPLE = 5000
# With fewer values nothing can be said about how often they repeat.
_FEW = 20
_MAX_LABEL_LENGTH, _MAX_SURE_LENGTH = 150, 60
# Words of the name of a column.
_MOST_WORDS = 4


@dataclass(frozen=True)
class FoundColumns:
    """Where a table has its texts and labels."""

    text: str
    labels: str
    format: str  # "lists", "JSON lists" (as text), "delimited" or "one each" (one label in a row)
    delimiter: str | None = None
    id: str | None = None  # identifies documents
    others: tuple[str, ...] = ()  # not used
    more_texts: tuple[str, ...] = ()  # texts that follow the first one


def find_columns(
    dataset: Dataset,
    text_column: str | Sequence[str] | None = None,
    label_column: str | None = None,
    label_delimiter: str | None = None,
    known: Mapping[str, Any] | None = None,
) -> FoundColumns:
    """
    Finds the columns of texts and labels, and what separates the labels, as far as they are not given.

    A `label_delimiter` of `""` stands for one label in each row. `known` is the result for other data of the same
    kind; it is used where it fits.
    """
    names = dataset.column_names
    texts = [text_column] if isinstance(text_column, str) else list(text_column or ())
    if not texts and known and known["text"] in names:
        texts = texts_of(known)
    for flag, name in (*(("text_column", name) for name in texts), ("label_column", label_column)):
        if name is not None and name not in names:
            hint = f" The model was trained on {', '.join(texts)}: give `text_column`." if known else ""
            raise ValueError(f"`{flag}`: there is no column `{name}`; the columns are {', '.join(names)}.{hint}")
    step = max(1, len(dataset) // _SAMPLE)
    rows = dataset.select(range(0, len(dataset), step)) if step > 1 else dataset
    sample = {name: [value for value in rows[name] if value not in (None, "")] for name in names}
    if known:
        label_column = label_column or (known["labels"] if known["labels"] in names else None)
        if label_delimiter is None and label_column == known["labels"]:
            label_delimiter = _known_delimiter(known, sample[label_column])
    if len(set(texts)) < len(texts) or label_column in texts:
        raise ValueError(f"`text_column`: give each column once, and not that of the labels; got {', '.join(texts)}.")
    if not label_column:
        label_column = _find_labels(sample, texts)
        _check_single(label_column, names)
    if not texts:
        texts = [_find_text(sample, label_column)]
        _check_header(texts[0])
    kind, delimiter = _label_format(sample[label_column], label_delimiter, label_column)
    others = [name for name in names if name not in (*texts, label_column)]
    identifier = next((name for name in others if _rank(name, _ID_NAMES) is not None), None)
    return FoundColumns(texts[0], label_column, kind, delimiter, identifier, tuple(others), tuple(texts[1:]))


def texts_of(columns: Mapping[str, Any]) -> list[str]:
    """The columns of texts among the fields of [`FoundColumns`]; none if these are empty."""
    return [columns["text"], *columns.get("more_texts", ())] if columns else []


def _known_delimiter(known: Mapping[str, Any], values: list[Any]) -> str | None:
    if known["format"] == "one each":
        return ""
    delimiter = known["delimiter"]
    return delimiter if delimiter and any(delimiter in str(value) for value in values) else None


def parse_labels(value: Any, found: FoundColumns) -> list[str] | list[int]:
    """The labels of a row."""
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [label for label in value if label is not None and label != ""]
    text = str(value).strip()
    if found.format == "JSON lists" and text:
        items = _parse_list(text)
        if items is None:
            raise ValueError(f'{text[:60]!r} is not a list of labels such as ["a", "b"]')
        return [str(item).strip() for item in items if str(item).strip()]
    if found.delimiter is None:
        return [text] if text else []
    parts = text.split() if found.delimiter == " " else text.split(found.delimiter)
    return [part.strip() for part in parts if part.strip()]


def split_lists(values: Sequence[Any], delimiters: str, known: set[str] | None = None) -> list[list[Any]]:
    """
    The lists of a column: lists, lists as JSON or Python writes them, or delimited strings.

    Of the `delimiters`, the one that most strings have separates items; if it is `known` what items may be, the one
    that makes most strings lists of such items.
    """
    texts = [value.strip() for value in values if isinstance(value, str) and value.strip()]
    kind, delimiter = "one each", None
    if _are_lists(texts):
        kind = "JSON lists"
    elif texts and known is not None:
        choices = [FoundColumns("", "", "delimited", candidate) for candidate in (None, *delimiters)]
        best = max(choices, key=lambda found: sum(known.issuperset(parse_labels(t, found)) for t in texts))
        delimiter = best.delimiter
    elif texts:
        found = max(delimiters, key=lambda candidate: _share_with(texts, candidate))
        delimiter = found if _share_with(texts, found) > 0 else None
    return [parse_labels(value, FoundColumns("", "", kind, delimiter)) for value in values]


# ---- Columns ----


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())


def _rank(name: str, known: Sequence[str]) -> int | None:
    """Place of a column's name, or of its last word, among known names; exact names come first."""
    words = _words(name)
    if words and words[0] == "unnamed":
        return 0 if "unnamed" in known else None
    joined = "".join(words)
    if joined in known:
        return known.index(joined)
    return len(known) + known.index(words[-1]) if words and words[-1] in known else None


def _by_name(names: Iterable[str], known: Sequence[str]) -> list[str]:
    ranks = {name: _rank(name, known) for name in names}
    return sorted((name for name, rank in ranks.items() if rank is not None), key=lambda name: ranks[name] or 0)


def _find_labels(sample: dict[str, list[Any]], texts: Sequence[str]) -> str:
    possible = [name for name in sample if name not in texts and _may_be_labels(sample[name])]
    named = _by_name(possible, LABEL_NAMES)
    if not named:
        _check_spread(sample)
        sure = [name for name in sample if name not in texts and _is_surely_labels(name, sample)]
        named = _by_name(sure, LABEL_NAMES)
    if named:
        return named[0]
    lists = [name for name in possible if isinstance(sample[name][0], (list, tuple))]
    repeating = [name for name in possible if _rank(name, [*_ID_NAMES, *TEXT_NAMES]) is None]
    repeating = [name for name in repeating if len(sample[name]) >= _FEW]
    if not texts and len(possible) > 1:
        # The longest values are the text.
        repeating = [name for name in repeating if name != max(sample, key=lambda name: _mean_length(sample[name]))]
    for candidates in (lists, repeating):
        if len(candidates) == 1:
            return candidates[0]
    raise _not_found("labels", "`label_column` (`--label-column`)", sample)


def _is_surely_labels(name: str, sample: dict[str, list[Any]]) -> bool:
    """Whether the name of a column says that it has labels, and its values are short enough."""
    values = sample[name]
    if "".join(_words(name)) not in _SURE_NAMES or not values or not isinstance(values[0], str):
        return False
    found = FoundColumns("", "", *_label_format(values, None, name))
    labels = [str(label) for value in values for label in parse_labels(value, found)]
    return bool(labels) and sum(map(len, labels)) / len(labels) <= _MAX_SURE_LENGTH


def _check_single(name: str, names: Iterable[str]) -> None:
    """Raises if a column of labels is one of several with numbered names."""
    stem = name.rstrip("0123456789")
    numbered = [other for other in names if other.rstrip("0123456789") == stem and other != stem]
    if name != stem and len(numbered) > 1:
        raise ValueError(
            f"The labels seem to be in several columns: {', '.join(numbered)}. Join them into one, separated by `;`, "
            "or name one of them with `label_column` (`--label-column`)."
        )


def _check_spread(sample: dict[str, list[Any]]) -> None:
    """Raises if the labels are in columns with numbered names, or in a column of 0 and 1 for each label."""
    for name in _by_name((name.rstrip("0123456789") for name in sample), LABEL_NAMES):
        _check_single(next(other for other in sample if other.rstrip("0123456789") == name), sample)
    flags = [name for name, values in sample.items() if values and set(map(str, values)) == {"0", "1"}]
    if len(flags) > 1:
        raise ValueError(
            f"The columns {', '.join(flags)} have 0 and 1, one column for each label. Write the names of the columns "
            "with 1 into one column, separated by `;`."
        )


def _check_header(name: str) -> None:
    """Raises if the name of the column of the texts is a text itself."""
    if len(name.split()) > _MOST_WORDS:
        raise ValueError(
            f"`{name:.60}` seems to be a text and not the name of a column. Add a first line with the names of the "
            "columns, or name the column with `text_column` (`--text-column`)."
        )


def _not_found(what: str, option: str, sample: dict[str, list[Any]]) -> ValueError:
    message = f"No column is clearly that of the {what}; the columns are {', '.join(sample)}. Name it with {option}."
    # Names of columns are short and not numbers.
    looks_like_values = any(len(name) > 60 or name.replace(".", "").isdigit() for name in sample)
    hint = " Does the file lack a first line with the names of the columns?" if looks_like_values else ""
    return ValueError(message + hint)


def _find_text(sample: dict[str, list[Any]], label_column: str) -> str:
    possible = [
        name
        for name, values in sample.items()
        if name != label_column and values and isinstance(values[0], str) and _rank(name, _ID_NAMES) is None
    ]
    named = _by_name(possible, TEXT_NAMES)
    if named:
        return named[0]
    longest = sorted(possible, key=lambda name: _mean_length(sample[name]), reverse=True)
    if longest and (len(longest) == 1 or _mean_length(sample[longest[0]]) > 1.5 * _mean_length(sample[longest[1]])):
        return longest[0]
    raise _not_found("texts", "`text_column` (`--text-column`)", sample)


def _mean_length(values: list[Any]) -> float:
    strings = [value for value in values if isinstance(value, str)]
    return sum(map(len, strings)) / max(1, len(strings))


def _may_be_labels(values: list[Any]) -> bool:
    """Whether values are short and repeat."""
    if not values:
        return False
    if isinstance(values[0], (list, tuple)):
        return any(values) and all(isinstance(item, (str, int)) for value in values for item in value)
    if not isinstance(values[0], (str, int)) or isinstance(values[0], bool):
        return False
    texts = [str(value) for value in values]
    kind, delimiter = _label_format(texts, None, "")
    found = FoundColumns("", "", kind, delimiter)
    if kind == "JSON lists":
        texts = [text for text in texts if _parse_list(text) is not None]
    labels = [str(label) for text in texts for label in parse_labels(text, found)]
    if not labels or sum(map(len, labels)) / len(labels) > _MAX_LABEL_LENGTH:
        return False
    counts = Counter(labels)
    return len(texts) < _FEW or sum(count for count in counts.values() if count > 1) >= 0.5 * len(labels)


# ---- Labels ----


def _label_format(values: list[Any], delimiter: str | None, column: str) -> tuple[str, str | None]:
    if not values:
        raise ValueError(f"Column `{column}` is empty. Name the column of the labels with `label_column`.")
    if isinstance(values[0], (list, tuple)):
        return "lists", None
    texts = [str(value).strip() for value in values]
    if delimiter is not None:
        return ("delimited", delimiter) if delimiter else ("one each", None)
    if _are_lists(texts):
        return "JSON lists", None
    found = max(_CERTAIN_DELIMITERS, key=lambda candidate: _share_with(texts, candidate))
    if _share_with(texts, found) >= 0.01:
        return "delimited", found
    if _is_list(texts, ","):
        return "delimited", ","
    return ("delimited", " ") if _are_codes(texts) else ("one each", None)


def _parse_list(text: str) -> list[Any] | None:
    """A list as JSON or as Python writes it."""
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(value, (list, tuple)):
            return list(value)
    return None


def _are_lists(texts: list[str]) -> bool:
    return sum(text.startswith("[") and _parse_list(text) is not None for text in texts) > 0.9 * len(texts)


def _share_with(texts: list[str], delimiter: str) -> float:
    return sum(delimiter in text for text in texts) / len(texts)


def _is_list(texts: list[str], delimiter: str) -> bool:
    """Whether a delimiter separates labels: real lists combine few parts to many values; "Paris, France" does not."""
    split = [text for text in texts if delimiter in text]
    if not split or len(texts) < _FEW:
        return bool(split)
    parts = Counter(part.strip() for text in split for part in text.split(delimiter))
    repeated = sum(count for count in parts.values() if count > 1) / parts.total()
    if len(set(split)) > 0.8 * len(split) > 0.4 * len(texts) and repeated >= 0.2:
        return True  # with many labels in few rows, values hardly ever repeat and parts often do
    return repeated >= 0.5 and len(parts) < len(set(split))


def _are_codes(texts: list[str]) -> bool:
    """Whether values are codes separated by spaces, such as `cs.CL cs.LG`."""
    split = [text for text in texts if " " in text]
    parts = Counter(part for text in split for part in text.split())
    if len(split) < 0.05 * len(texts) or len(parts) >= len(set(split)):
        return False
    return sum(count for part, count in parts.items() if re.search(r"[\d._:-]", part)) > 0.9 * parts.total()
