"""Finds encoding, separator and columns of a file of delimited text."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec

from .streams import BLOCK_BYTES

SEPARATORS = (",", ";", "\t", "|")
_SAMPLE_CHARACTERS = 1 << 18
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is the start of this one
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# Bytes without a character in Windows-1252. Latin-1 has a control character for each.
_NOT_IN_WINDOWS_1252 = b"\x81\x8d\x8f\x90\x9d"


@dataclass(frozen=True)
class CsvFormat:
    """How to read a file of delimited text, whose first line names the columns."""

    encoding: str
    separator: str
    columns: tuple[str, ...]
    skipped: int = 0  # lines before the first one: Excel writes `sep=;`


def find_csv_format(path: str | Path, encoding: str | None = None, separator: str | None = None) -> CsvFormat:
    """Finds encoding and separator, as far as they are not given, and columns of a file, which may be compressed."""
    encoding = encoding or find_encoding(path)
    try:
        with fsspec.open(str(path), "rt", encoding=encoding, newline="", compression="infer") as file:
            sample = file.read(_SAMPLE_CHARACTERS)
    except UnicodeError as error:
        raise ValueError(f"`{path}` is not {encoding} ({error}). Give another `encoding`.") from error
    except LookupError as error:
        raise ValueError(f"`encoding={encoding!r}` is not an encoding that Python knows.") from error
    is_whole = len(sample) < _SAMPLE_CHARACTERS
    told = re.match(r'"?sep=(.)"?[^\S\n]*\n', sample)
    if told:
        sample, separator = sample[told.end() :], separator or told[1]
    if separator is None:
        separator = max(SEPARATORS, key=lambda candidate: _separates(sample, candidate, is_whole))
    names = next(_records(sample, separator), [])
    return CsvFormat(encoding, separator, _unique_names(path, names), skipped=int(told is not None))


def find_encoding(path: str | Path) -> str:
    """The encoding of a text file: that of its byte order mark, UTF-8, or else Windows-1252 or Latin-1."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    is_utf8, damaged, foreign, line, bad_line = True, 0, 0, 1, 0
    encoding = "cp1252"
    with fsspec.open(str(path), "rb", compression="infer") as file:
        block = file.read(BLOCK_BYTES)
        for mark, marked in _BOMS:
            if block.startswith(mark):
                return marked
        if b"\x00" in block[:1000]:
            # Latin letters have a zero as the second byte in little-endian order, as the first in big-endian order.
            return "utf-16-le" if block[1:1000:2].count(0) >= block[:1000:2].count(0) else "utf-16-be"
        while block:
            text = decoder.decode(block)
            if not text.isascii():
                count = text.count("\ufffd")
                damaged += count
                foreign += sum(character > "\x7f" for character in text) - count
                if count and not bad_line:
                    bad_line = line + text[: text.index("\ufffd")].count("\n")
            line += block.count(b"\n")
            is_utf8 = damaged == 0
            if any(byte in block for byte in _NOT_IN_WINDOWS_1252):
                encoding = "latin-1"
            block = file.read(BLOCK_BYTES)
        damaged += decoder.decode(b"", final=True).count("\ufffd")
    if is_utf8 and not damaged:
        return "utf-8"
    if foreign > 10 * damaged:
        raise ValueError(
            f"`{path}`, line {bad_line}: a character is damaged; the rest of the file is UTF-8. Correct the line, or "
            "give the `encoding` of the file."
        )
    return encoding


def _records(sample: str, separator: str) -> Iterator[list[str]]:
    return csv.reader(io.StringIO(sample, newline=""), delimiter=separator, skipinitialspace=True)


def _separates(sample: str, separator: str, is_whole: bool) -> tuple[float, int]:
    """How well a separator fits: the share of records as long as the first one, and their length."""
    try:
        lengths = [len(record) for record in _records(sample, separator) if record]
    except csv.Error:
        return 0.0, 0
    if not is_whole and len(lengths) > 1:
        lengths.pop()  # the sample ends within it
    if not lengths or lengths[0] < 2:
        return 0.0, 0
    return round(lengths.count(lengths[0]) / len(lengths), 2), lengths[0]


def _unique_names(path: str | Path, names: list[str]) -> tuple[str, ...]:
    names = [name or f"Unnamed: {number}" for number, name in enumerate(names)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"`{path}`, line 1: there are {names.count(name)} columns `{name}`. Rename them.")
    return tuple(names)
