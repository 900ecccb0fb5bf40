"""TF-IDF features of text: fit, transform, file."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
from scipy.sparse import csr_matrix, hstack

from .document_times import NUM_COLUMNS, compile_time_pattern, read_time, time_features
from .kernels_text import (
    count_ngrams,
    index_terms,
    merge_ngrams,
    merge_words,
    node_keys,
    read_chars,
    read_words,
    spell,
    weigh,
)
from .serialization import atomic_write, load_tensors, resolve_file, save_tensors
from .utils import count_threads

TFIDF_FILE = "tfidf.safetensors"
VOCABULARY_FILE = "tfidf_vocab.txt"

_CHUNK = 1 << 20  # code points that are worked on at a time: large enough to keep threads busy, small in memory
_ANALYZERS = {"word": r"\w+", "char_wb": r"\S+"}  # what the runs of text are made of that n-grams are taken from
_Result = TypeVar("_Result")
_Lexicon = tuple[np.ndarray, np.ndarray, np.ndarray, int]  # table, ends, chars, number of words
_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@lru_cache
def _code_points_of(pattern: str) -> np.ndarray:
    """Which code points the runs of `pattern` consist of: Python's own notion, as a table for the compiled loops."""
    everything = _decode(np.arange(0x110000, dtype=np.uint32))
    table = np.zeros(len(everything), np.bool_)
    for run in re.finditer(pattern, everything):
        table[run.start() : run.end()] = True
    return table


def _encode(text: str) -> np.ndarray:
    # Copied, as the compiled loops would need a second version of themselves for read-only arrays.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).copy()


def _decode(codes: np.ndarray) -> str:
    return codes.tobytes().decode("utf-32-le", "surrogatepass")


def _new_lexicon() -> _Lexicon:
    return np.zeros((1024, 2), np.uint64), np.zeros(512, np.int64), np.zeros(4096, np.uint32), 0


def _rows(texts: Iterable[str]) -> Iterator[str]:
    if isinstance(texts, Sequence) and not isinstance(texts, deque):
        # A column of a dataset reads its rows eight times as fast by slices as one by one.
        for start in range(0, len(texts), 256):
            yield from texts[start : start + 256]
    else:
        yield from texts


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts in lists of about `_CHUNK` code points; the same lists whatever the number of workers."""
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"`texts` is one {type(texts).__name__}, not several texts. Pass a list: `[text]`.")
    chunk: list[str] = []
    size = 0
    for position, text in enumerate(_rows(texts)):
        if not isinstance(text, str):
            raise TypeError(
                f"`texts[{position}]` is {type(text).__name__}, not str. Remove the document or give it the text ''."
            )
        chunk.append(text)
        size += len(text) + 1
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _map(
    function: Callable[[list[str]], _Result], chunks: Iterator[list[str]], num_threads: int | None
) -> Iterator[_Result]:
    """`function` of every chunk, in their order, by threads: the compiled loops release Python's global lock."""
    num_threads = count_threads(num_threads)
    start = list(islice(chunks, 2))
    if num_threads == 1 or len(start) < 2:
        yield from map(function, chain(start, chunks))
        return
    with ThreadPoolExecutor(num_threads) as pool:
        pending: deque[Future[_Result]] = deque()
        for chunk in chain(start, chunks):
            pending.append(pool.submit(function, chunk))
            if len(pending) > 2 * num_threads:  # as many texts are in memory, not all
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class _Counts:
    """All n-grams of a corpus so far, in how many documents each one is and how often it occurs."""

    def __init__(self) -> None:
        self.num_documents = 0
        self.has_dates = False
        self.lexicon = _new_lexicon()
        self.trie = np.zeros((4096, 2), np.uint64), np.zeros(2048, np.int64), np.zeros(2048, np.int64), 1

    def add(self, num_documents: int, has_dates: bool, lexicon: _Lexicon | None, trie: _Arrays) -> None:
        """Adds what was counted in one chunk; `lexicon` is `None` where symbols are characters."""
        self.num_documents += num_documents
        self.has_dates |= has_dates
        numbers = np.zeros(0, np.uint32)
        if lexicon is not None:
            table, ends, chars, words, numbers = merge_words(*self.lexicon, *lexicon[1:])
            self.lexicon = table, ends, chars, words
        self.trie = merge_ngrams(*self.trie, *trie, numbers)
        if self.trie[-1] >= 1 << 31:
            raise ValueError("The texts have more than two billion different n-grams. Fit on a sample of the texts.")

    def select(self, min_df: int, max_features: int | None) -> tuple[list[str], np.ndarray]:
        """The terms in `min_df` or more documents, or the most frequent of these, sorted; and their documents."""
        table, documents, occurrences, size = self.trie
        words, chars, num_words = self.lexicon[1:]
        keys = node_keys(table, size)

        def spelled(nodes: np.ndarray) -> list[tuple[str, int]]:
            text = _decode(spell(nodes, keys, words if num_words else words[:0], chars))
            return sorted(zip(text.split("\n"), nodes.tolist(), strict=False))

        nodes = np.flatnonzero(documents[:size] >= min_df)
        if max_features is not None and len(nodes) > max_features:
            often = occurrences[nodes]
            least = np.partition(often, -max_features)[-max_features]
            kept, tied = nodes[often > least], spelled(nodes[often == least])
            nodes = np.append(kept, [node for _, node in tied[: max_features - len(kept)]])
        terms = spelled(nodes)
        return [term for term, _ in terms], documents[[node for _, node in terms]]


class TfidfFeaturizer:
    r"""
    Sparse TF-IDF features of text, with the weights of scikit-learn's `TfidfVectorizer`.

    Rows have Euclidean norm 1, columns are the terms in sorted order; with `lead_words` once more, for the terms among
    a document's first words, and with `time_pattern` pairs of a term and a time follow. The work is done by compiled
    loops that run in threads; a result does not depend on their number.

    Args:
        analyzer (`str`, *optional*, defaults to `"word"`):
            `"word"` for n-grams of words (two and more letters, digits or underscores), `"char_wb"` for n-grams of
            characters inside words, each word with a space on either side.
        ngram_range (`tuple[int, int]`, *optional*, defaults to `(1, 2)`):
            Smallest and largest n.
        min_df (`int`, *optional*, defaults to 3):
            Number of documents that a term must be in to be kept.
        max_features (`int`, *optional*, defaults to 300000):
            Number of terms to keep, the most frequent ones; of equally frequent ones the first in sorted order.
            `None` or 0 keeps all.
        sublinear_tf (`bool`, *optional*, defaults to `True`):
            Whether a term that occurs `n` times in a document counts `1 + log(n)` instead of `n`.
        lowercase (`bool`, *optional*, defaults to `True`):
            Whether case is ignored.
        lead_words (`int`, *optional*, defaults to 0):
            Number of words at the start of a document, such as its title, whose terms have columns of their own
            besides. 0 makes none.
        lead_weight (`float`, *optional*, defaults to 0.7):
            Length of that second part of a row in proportion to the first.
        power (`float`, *optional*, defaults to 1.0):
            Power that weights are raised to. More than 1 makes rare and repeated terms weigh more beside the others.
        time_pattern (`str`, *optional*):
            Regular expression of a document's date, with a group named `year` and perhaps one named `month` (a number
            or an English name), such as `(?P<month>[A-Z]\w+) (?P<year>\d{4})`. The first match that is a date counts.
            The terms among the first words (all terms where `lead_words` is 0), of n-grams the shortest, then have
            features by time as well: what a term says of a document may change over the years. `None` or
            `""` makes none.
        time_span (`float`, *optional*, defaults to 1.0):
            Years over which these features change. Documents so far apart share about half of them, documents three
            times as far apart none.
        time_weight (`float`, *optional*, defaults to 0.5):
            Length of this last part of a row in proportion to all before it.

    Example:

    ```python
    >>> featurizer = TfidfFeaturizer(min_df=1).fit(["solar energy", "wind energy"])
    >>> featurizer.vocabulary
    ['energy', 'solar', 'solar energy', 'wind', 'wind energy']
    >>> featurizer.transform(["energy of the sun"]).toarray()
    array([[1., 0., 0., 0., 0.]], dtype=float32)
    ```
    """

    def __init__(
        self,
        *,
        analyzer: str = "word",
        ngram_range: tuple[int, int] = (1, 2),
        min_df: int = 3,
        max_features: int | None = 300_000,
        sublinear_tf: bool = True,
        lowercase: bool = True,
        lead_words: int = 0,
        lead_weight: float = 0.7,
        power: float = 1.0,
        time_pattern: str | None = None,
        time_span: float = 1.0,
        time_weight: float = 0.5,
    ) -> None:
        if analyzer not in _ANALYZERS:
            raise ValueError(f"`analyzer` is {analyzer!r}; it must be one of {', '.join(map(repr, _ANALYZERS))}.")
        if len(ngram_range) != 2 or not 1 <= ngram_range[0] <= ngram_range[1]:
            raise ValueError(f"`ngram_range` is {ngram_range!r}; it must be two numbers (n, m) with 1 <= n <= m.")
        if not isinstance(min_df, int) or min_df < 1:
            raise ValueError(f"`min_df` is {min_df!r}; it must be a number of documents, at least 1.")
        if max_features is not None and max_features < 0:
            raise ValueError(f"`max_features` is {max_features!r}; it must be at least 1, or 0 to keep all terms.")
        if not isinstance(lead_words, int) or lead_words < 0:
            raise ValueError(f"`lead_words` is {lead_words!r}; it must be a number of words, or 0 for none.")
        positive = {"lead_weight": lead_weight, "power": power, "time_span": time_span, "time_weight": time_weight}
        for name, value in positive.items():
            if not 0 < value < np.inf:
                raise ValueError(f"`{name}` is {value!r}; it must be a finite number greater than 0.")
        self.analyzer = analyzer
        self.ngram_range = (int(ngram_range[0]), int(ngram_range[1]))
        self.min_df = min_df
        self.max_features = max_features or None
        self.sublinear_tf = sublinear_tf
        self.lowercase = lowercase
        self.lead_words = lead_words
        self.lead_weight = float(lead_weight)
        self.power = float(power)
        self.time_pattern = time_pattern or None
        self.time_span = float(time_span)
        self.time_weight = float(time_weight)
        self._compiled_time_pattern = compile_time_pattern(time_pattern) if time_pattern else None
        self.vocabulary: list[str] = []
        self._idf = np.zeros(0, np.float32)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._settings().items())
        return f"{type(self).__name__}({settings}, num_features={self.num_features})"

    @property
    def num_features(self) -> int:
        """Columns of the matrix: one for each term, another where it is a first word, and those of times."""
        return self._num_term_columns + (0 if self.time_pattern is None else NUM_COLUMNS)

    @property
    def _num_term_columns(self) -> int:
        return len(self.vocabulary) * (2 if self.lead_words else 1)

    def fit(self, texts: Iterable[str], num_threads: int | None = None) -> TfidfFeaturizer:
        """
        Learns vocabulary and document frequencies.

        Args:
            texts (`Iterable[str]`):
                The documents, e.g. a list or a column of a `datasets.Dataset`; read once, a few at a time.
            num_threads (`int`, *optional*):
                Number of threads; all processors by default.
        """
        counts = _Counts()
        for part in _map(self._count, _chunks(texts), num_threads):
            counts.add(*part)
        if not counts.num_documents:
            raise ValueError("There are no texts to fit TF-IDF on. Pass at least one document.")
        terms, documents = counts.select(self.min_df, self.max_features)
        if not terms:
            raise ValueError(
                f"No term is in {self.min_df} or more of the {counts.num_documents} texts. "
                f"Lower `min_df`, or check that the texts have words for `analyzer={self.analyzer!r}` "
                f"and `ngram_range={self.ngram_range}`."
            )
        if self.time_pattern is not None and not counts.has_dates:
            raise ValueError(
                f"`time_pattern={self.time_pattern!r}` finds no date in any of the {counts.num_documents} texts. "
                "Mend the pattern, or leave it out."
            )
        idf = np.log((1 + counts.num_documents) / (1 + documents)) + 1
        self._index("".join(f"{term}\n" for term in terms), idf.astype(np.float32))
        return self

    def transform(self, texts: Iterable[str], num_threads: int | None = None) -> csr_matrix:
        """
        Features of the documents, a row each.

        Args:
            texts (`Iterable[str]`):
                The documents, read once, a few at a time.
            num_threads (`int`, *optional*):
                Number of threads; all processors by default. A small input is done by the calling thread.

        Returns:
            `csr_matrix` of float32 with sorted columns. A document without known term is an empty row.
        """
        self._check_fitted()
        parts = list(_map(self._weigh, _chunks(texts), num_threads))
        if len(parts) == 1:
            indptr, indices, values = parts[0]
        else:
            sizes = np.concatenate([np.zeros(1, np.int64), *(np.diff(part[0]) for part in parts)])
            indptr = np.cumsum(sizes)
            indices = np.concatenate([np.zeros(0, np.int32), *(part[1] for part in parts)])
            values = np.concatenate([np.zeros(0, np.float32), *(part[2] for part in parts)])
        matrix = csr_matrix((values, indices, indptr), shape=(len(indptr) - 1, self.num_features))
        matrix.has_canonical_format = True
        return matrix

    def fit_transform(self, texts: Iterable[str], num_threads: int | None = None) -> csr_matrix:
        """`fit` and `transform` of the same texts, which are read twice."""
        if isinstance(texts, Iterator):
            raise TypeError("`texts` can be read only once. Pass a list or a column of a dataset to `fit_transform`.")
        return self.fit(texts, num_threads).transform(texts, num_threads)

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes `tfidf.safetensors` (settings, idf) and `tfidf_vocab.txt` (a term per line) into a folder."""
        self._check_fitted()
        content = "".join(f"{term}\n" for term in self.vocabulary).encode("utf-8", "surrogatepass")
        with atomic_write(os.path.join(save_directory, VOCABULARY_FILE)) as path, open(path, "wb") as file:
            file.write(content)
        metadata = {"settings": json.dumps(self._settings()), "vocabulary_crc32": str(zlib.crc32(content))}
        save_tensors(os.path.join(save_directory, TFIDF_FILE), {"idf": self._idf}, "tfidf", metadata)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike, **hub_kwargs: Any) -> TfidfFeaturizer:
        """
        Loads what [`~TfidfFeaturizer.save_pretrained`] wrote.

        Args:
            name_or_path (`str` or `os.PathLike`):
                A local folder or a model id on the Hub.
            hub_kwargs:
                `revision`, `token`, `cache_dir` … for the Hub.
        """
        paths = [resolve_file(name_or_path, name, **hub_kwargs) for name in (TFIDF_FILE, VOCABULARY_FILE)]
        tensors, metadata = load_tensors(str(paths[0]), "tfidf")
        with open(str(paths[1]), "rb") as file:
            content = file.read()
        if str(zlib.crc32(content)) != metadata["vocabulary_crc32"]:
            raise ValueError(
                f"`{paths[1]}` is not the vocabulary that `{paths[0]}` was saved with: it is damaged, was edited or "
                "is of another model. Save or download both again."
            )
        featurizer = cls(**json.loads(metadata["settings"]))
        featurizer._index(content.decode("utf-8", "surrogatepass"), np.array(tensors["idf"]))
        return featurizer

    def _settings(self) -> dict[str, Any]:
        names = (
            "analyzer",
            "ngram_range",
            "min_df",
            "max_features",
            "sublinear_tf",
            "lowercase",
            "lead_words",
            "lead_weight",
            "power",
            "time_pattern",
            "time_span",
            "time_weight",
        )
        return {name: getattr(self, name) for name in names}

    def _check_fitted(self) -> None:
        if not self.vocabulary:
            raise ValueError(
                "The TF-IDF featurizer is not fitted. Call `fit` first, or load one with `from_pretrained`."
            )

    def _codes(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Code points of the texts, one behind the other, and the bounds between them."""
        if self.lowercase:
            texts = [text.lower() for text in texts]
        bounds = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)), out=bounds[1:])
        return _encode("".join(texts)), bounds

    def _count(self, texts: list[str]) -> tuple[int, bool, _Lexicon | None, _Arrays]:
        """Words and n-grams of a chunk, for [`_Counts`]."""
        inside = _code_points_of(_ANALYZERS[self.analyzer])
        lexicon: _Lexicon | None = None
        if self.analyzer == "word":
            symbols, bounds, *words = read_words(*self._codes(texts), inside, *_new_lexicon(), True)
            lexicon = tuple(words)
        else:
            symbols, bounds = read_chars(*self._codes(texts), inside)
        table, documents, occurrences = count_ngrams(symbols, bounds, *self.ngram_range, self.analyzer == "char_wb")
        has_dates = not all(map(np.isnan, self._times(texts)))
        return len(texts), has_dates, lexicon, (node_keys(table, len(documents)), documents, occurrences)

    def _index(self, lines: str, idf: np.ndarray) -> None:
        """Takes on a vocabulary, a term per line, and its weights."""
        self.vocabulary = lines.split("\n")[:-1]
        self._idf = idf
        codes = _encode(lines)
        ends = np.flatnonzero(codes == ord("\n")) + 1
        bounds = np.append(0, ends)
        if self.analyzer == "word":
            inside = _code_points_of(_ANALYZERS["word"])
            symbols, bounds, *words = read_words(codes, bounds, inside, *_new_lexicon(), True)
            self._lexicon: _Lexicon = tuple(words)
        else:
            symbols = np.where(codes == ord("\n"), np.uint32(0), codes + np.uint32(1))
        self._table, columns = index_terms(symbols, bounds)
        self._columns = columns.copy()
        if self.time_pattern is not None:
            self._is_shortest = np.fromiter(map(self._length, self.vocabulary), np.int64) == self.ngram_range[0]

    def _length(self, term: str) -> int:
        """The n of an n-gram."""
        return term.count(" ") + 1 if self.analyzer == "word" else len(term)

    def _weigh(self, texts: list[str]) -> _Arrays:
        """Rows of a chunk as CSR arrays."""
        inside = _code_points_of(_ANALYZERS[self.analyzer])
        if self.analyzer == "word":
            symbols, bounds = read_words(*self._codes(texts), inside, *self._lexicon, False)[:2]
        else:
            symbols, bounds = read_chars(*self._codes(texts), inside)
        indptr, indices, values = weigh(
            symbols,
            bounds,
            self._table,
            self._columns,
            self._idf,
            self.ngram_range[1],
            self.sublinear_tf,
            self.lead_words,
            self.lead_weight,
            self.power,
            self.analyzer == "char_wb",
        )
        if self.time_pattern is not None:
            return self._with_times(texts, indptr, indices, values)
        return indptr, indices.copy(), values.copy()  # without the room that was left over

    def _times(self, texts: list[str]) -> Iterator[float]:
        """When the documents are from; nothing without a pattern to see it by."""
        if self._compiled_time_pattern is not None:
            for text in texts:
                yield read_time(text, self._compiled_time_pattern)

    def _with_times(self, texts: list[str], indptr: np.ndarray, indices: np.ndarray, values: np.ndarray) -> _Arrays:
        """Rows, given as CSR arrays, followed by pairs of their terms and their times."""
        times = np.fromiter(self._times(texts), np.float64, len(texts))
        first = self._num_term_columns - len(self.vocabulary)
        paired = np.flatnonzero(indices >= first)
        paired = paired[self._is_shortest[indices[paired] - first]]
        documents = np.repeat(np.arange(len(texts)), np.diff(indptr))[paired]
        pairs = time_features(documents, indices[paired] - first, values[paired], times, self.time_span)
        rows = csr_matrix((values, indices, indptr), shape=(len(texts), self._num_term_columns))
        joined = csr_matrix(hstack([rows, pairs * np.float32(self.time_weight)], format="csr"))
        lengths = np.where(np.diff(pairs.indptr) > 0, np.hypot(1, self.time_weight), 1)
        joined.data /= np.repeat(lengths, np.diff(joined.indptr)).astype(np.float32)
        return joined.indptr.astype(np.int64), joined.indices.astype(np.int32), joined.data
