"""When a document is from, and features of its terms that hold for that time alone."""

from __future__ import annotations

import re

import numpy as np
from scipy.sparse import csr_matrix

# Pairs of a term and a moment are hashed to so many columns: a vocabulary of pairs would be as large as that of terms.
NUM_COLUMNS = 1 << 18

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_REACH = 1.5  # in spans: from further away a document has no part in the features of a moment


def compile_time_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression with a group `year` and perhaps a group `month`; raises for any other."""
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"`time_pattern` is {pattern!r}, no regular expression: {error}.") from error
    if "year" not in compiled.groupindex:
        raise ValueError(
            f"`time_pattern` is {pattern!r}; it must have a group named `year`, and may have one named `month`, "
            r"such as (?P<year>\d{4})-(?P<month>\d\d)."
        )
    return compiled


def read_time(text: str, pattern: re.Pattern[str]) -> float:
    """
    The time of a document in years: the first match of `pattern` that is a date; NaN where there is none.

    Args:
        text (`str`):
            The document.
        pattern (`re.Pattern`):
            What [`compile_time_pattern`] made. A year has up to four digits; a month is a number or an English name of
            three letters or more. A match with anything else is passed over.
    """
    for found in pattern.finditer(text):
        groups = found.groupdict()
        year, month = groups["year"] or "", _number_of_month(groups.get("month"))
        if month is not None and year.isdecimal() and len(year) <= 4:
            return int(year) + (month - 1) / 12
    return np.nan


def _number_of_month(month: str | None) -> int | None:
    if not month:
        return 1
    if month[:3].lower() in _MONTHS:
        return _MONTHS.index(month[:3].lower()) + 1
    return int(month) if month.isdecimal() and 1 <= int(month) <= 12 else None


def time_features(
    documents: np.ndarray, terms: np.ndarray, weights: np.ndarray, times: np.ndarray, span: float
) -> csr_matrix:
    """
    Features of terms that hold for a time: each pair of a term and a moment has a column.

    Moments are `span` years apart, and a document has part in those around its time, the more the nearer they are. So
    two documents of the same time share all of a common term, if they are `span` years apart half to two thirds of it,
    and nothing if they are three times as far apart.

    Args:
        documents (`np.ndarray`), terms (`np.ndarray`), weights (`np.ndarray`):
            Row, number and weight of each term of each document.
        times (`np.ndarray`):
            Time of each document in years; one that is NaN gets no features.
        span (`float`):
            Years from moment to moment.

    Returns:
        `csr_matrix` of shape `(len(times), NUM_COLUMNS)`, rows of length 1 or empty.
    """
    dated = ~np.isnan(times[documents])
    documents, terms, weights = documents[dated], terms[dated].astype(np.uint64), weights[dated]
    positions = times[documents] / span
    nearest = np.round(positions)
    rows, columns, values = [], [], []
    for moments in (nearest - 1, nearest, nearest + 1):
        shares = np.cos(np.minimum(np.abs(positions - moments) / _REACH, 1) * (np.pi / 2))
        keys = terms << np.uint64(32) | moments.astype(np.int64).astype(np.uint32)
        near = shares > 1e-6
        rows.append(documents[near])
        columns.append(_mixed(keys[near]) % np.uint64(NUM_COLUMNS))
        values.append((weights * shares)[near])
    places = np.concatenate(rows), np.concatenate(columns).astype(np.int32)
    features = csr_matrix((np.concatenate(values), places), shape=(len(times), NUM_COLUMNS), dtype=np.float32)
    features.sort_indices()
    lengths = np.sqrt(features.multiply(features).sum(axis=1)).A1
    features.data /= np.repeat(lengths, np.diff(features.indptr)).astype(np.float32)
    return features


def _mixed(keys: np.ndarray) -> np.ndarray:
    """Numbers without the regularities of the keys, for a hash table: the last steps of SplitMix64."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
