"""Streams text files, plain or gzipped, into the Arrow cache of `datasets`."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import datasets
import pyarrow as pa
from datasets.builder import Key
from datasets.exceptions import DatasetGenerationError

BLOCK_BYTES = 4 << 20
# Part of each cache key. Increase it when a reader changes its result for the same file.
_READER_VERSION = 1


@contextmanager
def open_bytes(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Opens a plain or gzipped file. Raises a `ValueError` with its name if it is damaged gzip."""
    with open(path, "rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            with gzip.open(raw) if zipped else raw as file:
                yield file  # type: ignore[misc]
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"`{path}` is truncated or damaged gzip ({error}). Download it again, or unpack and check it."
            ) from error


def line_blocks(file: IO[bytes]) -> Iterator[list[bytes]]:
    """Yields the lines of a file in blocks of a few MB, without their newlines."""
    rest = b""
    while block := file.read(BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


def text_lines(path: str | os.PathLike) -> Iterator[str]:
    """Yields the lines of a UTF-8 file. Only newlines end a line, not other Unicode separators."""
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"`{path}`, line {number}, is not UTF-8 ({error.reason} at byte {error.start}). Convert the file."
                ) from error


@dataclass
class _TableConfig(datasets.BuilderConfig):
    tables: Callable[..., Iterator[pa.Table]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    features: datasets.Features | None = None
    split: str = "train"


class _TableBuilder(datasets.ArrowBasedBuilder):
    """Writes tables to the Arrow cache; `Dataset.from_generator` would write row by row."""

    BUILDER_CONFIG_CLASS = _TableConfig

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=self.config.features)

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        return [datasets.SplitGenerator(name=self.config.split)]

    def _generate_tables(self) -> Iterator[tuple[Key, pa.Table]]:
        for i, table in enumerate(self.config.tables(**self.config.options)):
            yield Key(0, i), table


def cached_dataset(
    tables: Callable[..., Iterator[pa.Table]],
    options: dict[str, Any],
    features: datasets.Features,
    *,
    files: list[Path],
    split: str = "train",
    cache_dir: str | None = None,
) -> datasets.Dataset:
    """
    Writes `tables(**options)` to the cache, unless it has them, and returns the memory-mapped dataset.

    The cache is not used if one of `files`, all files that are read, has changed. `cache_dir` is by default the cache
    of `datasets`.
    """
    key = hashlib.sha256(repr((_READER_VERSION, tables.__qualname__, sorted(options.items()), split)).encode())
    for path in files:
        state = path.stat()
        key.update(repr((str(path.resolve()), state.st_size, state.st_mtime_ns)).encode())
    builder = _TableBuilder(
        cache_dir=cache_dir,
        dataset_name="hf_xmc",
        config_id=f"{tables.__name__.strip('_')}-{key.hexdigest()[:24]}",
        tables=tables,
        options=options,
        features=features,
        split=split,
    )
    try:
        builder.download_and_prepare()
    except DatasetGenerationError as error:
        cause = plain_error(error)
        if isinstance(cause, OSError) and cause.errno is not None:
            raise OSError(
                cause.errno,
                f"`{files[0]}` cannot be written to the cache `{builder.cache_dir}` ({cause.strerror}). Set "
                "`HF_DATASETS_CACHE` to another disk",
            ) from error
        raise cause from error
    if not builder.info.splits[split].num_examples:  # `datasets` does not load a split without documents
        return datasets.Dataset(features.arrow_schema.empty_table(), datasets.DatasetInfo(features=features))
    return builder.as_dataset(split=split)


def plain_error(error: BaseException) -> Exception:
    """The original error of a reader, which `datasets` wraps."""
    cause = error
    while isinstance(cause, DatasetGenerationError) and cause.__cause__ is not None:
        cause = cause.__cause__
    return cause if isinstance(cause, Exception) else ValueError(str(cause))
