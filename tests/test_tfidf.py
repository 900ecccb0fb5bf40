from __future__ import annotations

import pickle
import re
from collections import Counter, deque

import numpy as np
import pytest
from datasets import Dataset
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from hf_xmc import tfidf
from hf_xmc.tfidf import TfidfFeaturizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog, the lazy dog sleeps.",
    "the lazy fox",
    "",
    "word",
    "a b c",
    "  \t\n ",
    "ΟΔΥΣΣΕΥΣ Straße STRASSE İstanbul naïve_x ǅ 東京 は 日本 の 首都 です العربية 123 x1 4²",
    "emoji 😀😀 and\u2028line\x85breaks\x1fhere\x00nul\x00nul zero\u200bwidth e\u0301 combining",
    "東京 の 首都 the quick dog straße ὀδυσσεύς 😀",
    "don't stop-me now_now now now now",
]
UNSEEN = ["completely unknown vocabulary", "", "the unknown dog the lazy", "dog", "ΣΣ 東京 の", "now now now"]
SETTINGS = [
    *({"ngram_range": n, "sublinear_tf": s} for n in [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)] for s in (True, False)),
    {"ngram_range": (1, 2), "lowercase": False},
    {"ngram_range": (1, 2), "min_df": 2},
    *({"analyzer": "char_wb", "ngram_range": n} for n in [(1, 1), (1, 3), (3, 5), (5, 5), (2, 12)]),
    {"analyzer": "char_wb", "ngram_range": (2, 4), "min_df": 2, "lowercase": False},
]


def random_texts(number: int, words: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    names = ["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(1, 9))) for _ in range(words)]
    return [" ".join(names[i] for i in rng.zipf(1.3, rng.integers(0, 60)) % words) for _ in range(number)]


def check_equals_sklearn(fit_on: list[str], texts: list[str], **settings) -> TfidfFeaturizer:
    settings = {"sublinear_tf": True, "min_df": 1, **settings}
    ours = TfidfFeaturizer(**settings, max_features=None).fit(fit_on)
    theirs = TfidfVectorizer(**settings).fit(fit_on)
    assert ours.vocabulary == theirs.get_feature_names_out().tolist()
    found, expected = ours.transform(texts), theirs.transform(texts)
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    expected.sort_indices()
    np.testing.assert_array_equal(found.indptr, expected.indptr)
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_allclose(found.data, expected.data, rtol=1e-6)
    return ours


def assert_identical(a, b) -> None:
    assert a.shape == b.shape
    for name in ("indptr", "indices", "data"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_sklearn(settings):
    check_equals_sklearn(TEXTS, TEXTS + UNSEEN, **settings)


@pytest.mark.parametrize(
    "settings", [{"ngram_range": (1, 3)}, {"analyzer": "char_wb", "ngram_range": (2, 5)}], ids=str
)
def test_equals_sklearn_where_tables_grow(settings, monkeypatch):
    monkeypatch.setattr(tfidf, "_CHUNK", 40_000)
    texts = random_texts(1500, 20_000)
    featurizer = check_equals_sklearn(texts, random_texts(300, 20_000, seed=1) + texts[:300], **settings)
    assert featurizer.num_features > 20_000


def test_every_code_point_is_classed_as_python_does():
    words, chars = (tfidf._code_points_of(tfidf._ANALYZERS[name]) for name in ("word", "char_wb"))
    everything = [chr(code) for code in range(0x110000)]
    np.testing.assert_array_equal(words, [char.isalnum() or char == "_" for char in everything])
    np.testing.assert_array_equal(chars, [not char.isspace() for char in everything])


@pytest.mark.parametrize("words", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    "settings",
    [{}, {"ngram_range": (1, 3), "sublinear_tf": False}, {"analyzer": "char_wb", "ngram_range": (1, 3)}],
    ids=str,
)
def test_first_words_have_columns_of_their_own(settings, words):
    settings = {"analyzer": "word", "sublinear_tf": True, "min_df": 1, "ngram_range": (1, 2), **settings}
    texts = TEXTS + UNSEEN
    ours = TfidfFeaturizer(**settings, max_features=None, lead_words=words, lead_weight=0.5).fit(TEXTS)
    theirs = TfidfVectorizer(**settings).fit(TEXTS)
    word = re.compile(r"\b\w\w+\b" if settings["analyzer"] == "word" else r"\S+")
    leads = [" ".join(word.findall(text.lower())[:words]) for text in texts]
    expected = np.hstack([theirs.transform(texts).toarray(), 0.5 * theirs.transform(leads).toarray()])
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    expected /= np.where(lengths == 0, 1, lengths)
    found = ours.transform(texts)
    assert ours.vocabulary == theirs.get_feature_names_out().tolist()
    assert found.shape == (len(texts), ours.num_features) == expected.shape
    np.testing.assert_allclose(found.toarray(), expected, rtol=1e-5)
    assert all((np.diff(row.indices) > 0).all() for row in found)


def test_a_document_whose_first_words_are_unknown_has_the_other_part_alone():
    featurizer = TfidfFeaturizer(min_df=1, lead_words=1).fit(["known words"])
    np.testing.assert_allclose(featurizer.transform(["strange words"]).toarray(), [[0, 0, 1, 0, 0, 0]])


@pytest.mark.parametrize("power", [0.5, 1.25, 2])
def test_weights_are_raised_to_a_power_in_each_part(power):
    settings = {"min_df": 1, "ngram_range": (1, 2), "sublinear_tf": True}
    ours = TfidfFeaturizer(**settings, lead_words=3, lead_weight=0.5, power=power).fit(TEXTS)
    theirs = TfidfVectorizer(**settings).fit(TEXTS)
    leads = [" ".join(re.findall(r"\b\w\w+\b", text.lower())[:3]) for text in TEXTS]
    whole, lead = (normalize(theirs.transform(texts).toarray() ** power) for texts in (TEXTS, leads))
    expected = normalize(np.hstack([whole, 0.5 * lead]))
    np.testing.assert_allclose(ours.transform(TEXTS).toarray(), expected, rtol=1e-5)


def test_rows_are_sorted_and_normalised():
    matrix = TfidfFeaturizer(min_df=1).fit(TEXTS).transform(TEXTS + UNSEEN)
    norms = np.sqrt(matrix.multiply(matrix).sum(axis=1)).A1
    empty = np.diff(matrix.indptr) == 0
    np.testing.assert_allclose(norms[~empty], 1, rtol=1e-6)
    assert {2, 4, 5, len(TEXTS), len(TEXTS) + 1} == set(np.flatnonzero(empty))
    assert matrix.has_sorted_indices
    matrix.has_sorted_indices = False
    assert all((np.diff(row.indices) > 0).all() for row in matrix)


def test_max_features_keeps_the_most_frequent_and_breaks_ties_by_term():
    texts = random_texts(200, 300)
    counts = Counter(word for text in texts for word in text.split() if len(word) > 1)
    ranked = sorted(counts, key=lambda term: (-counts[term], term))
    for size in (1, 10, 57, 100, len(ranked) - 1, len(ranked), len(ranked) + 1):
        featurizer = TfidfFeaturizer(ngram_range=(1, 1), min_df=1, max_features=size).fit(texts)
        assert featurizer.vocabulary == sorted(ranked[:size])
        # An n-gram is kept though its prefix is not, and its weight is that of a smaller vocabulary.
        reference = TfidfVectorizer(vocabulary=featurizer.vocabulary, sublinear_tf=True).fit(texts)
        np.testing.assert_allclose(
            featurizer.transform(texts).toarray(), reference.transform(texts).toarray(), rtol=1e-5
        )


def test_ngrams_are_found_without_their_prefix_in_the_vocabulary():
    texts = ["new york city"] * 3 + ["york city"] * 2
    featurizer = TfidfFeaturizer(ngram_range=(2, 3), min_df=1, max_features=2).fit(texts)
    assert featurizer.vocabulary == ["new york", "york city"]
    assert featurizer.transform(["old york city", "new city", "new york"]).toarray().tolist() == [
        [0, 1],
        [0, 0],
        [1, 0],
    ]


@pytest.mark.parametrize("analyzer", ["word", "char_wb"])
def test_result_is_the_same_for_any_number_of_workers_and_size_of_chunks(analyzer, monkeypatch):
    texts = random_texts(400, 2000)
    settings = {"analyzer": analyzer, "ngram_range": (1, 3), "min_df": 2, "max_features": 1000}
    first = TfidfFeaturizer(**settings).fit(texts, num_threads=1)
    expected = first.transform(texts, num_threads=1)
    for chunk in (1, 777, 50_000):
        monkeypatch.setattr(tfidf, "_CHUNK", chunk)
        for workers in (1, 2, 5, None):
            featurizer = TfidfFeaturizer(**settings).fit(texts, workers)
            assert featurizer.vocabulary == first.vocabulary
            assert_identical(featurizer.transform(texts, workers), expected)


def test_texts_are_any_iterable_and_are_streamed(monkeypatch):
    monkeypatch.setattr(tfidf, "_CHUNK", 100)
    texts = random_texts(300, 100)
    featurizer = TfidfFeaturizer().fit(texts)
    expected = featurizer.transform(texts)
    column = Dataset.from_dict({"text": texts})["text"]
    for source in (tuple(texts), column, deque(texts), np.array(texts), iter(texts), (text for text in texts)):
        assert_identical(featurizer.transform(source), expected)
    assert TfidfFeaturizer().fit(iter(texts)).vocabulary == featurizer.vocabulary
    assert_identical(TfidfFeaturizer().fit_transform(column), expected)

    read = 0

    def source():
        nonlocal read
        for text in texts:
            read += 1
            yield text

    results = tfidf._map(len, tfidf._chunks(source()), 2)
    next(results)
    assert 0 < read < len(texts)
    results.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"analyzer": "char_wb", "ngram_range": (2, 4)},
        {"lead_words": 3, "lead_weight": 0.4, "power": 1.25, "time_pattern": "(?P<year>1[0-9]+)", "time_span": 2.5},
    ],
    ids=str,
)
def test_saved_and_reloaded_it_gives_identical_matrices(settings, tmp_path):
    texts = [*TEXTS, "lone \ud83d\ude00 surrogates \ud83d \ude00\ud83d"]
    featurizer = TfidfFeaturizer(min_df=1, max_features=None, sublinear_tf=False, **settings).fit(texts)
    featurizer.save_pretrained(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["tfidf.safetensors", "tfidf_vocab.txt"]
    reloaded = TfidfFeaturizer.from_pretrained(tmp_path / "model")
    assert repr(reloaded) == repr(featurizer)
    assert reloaded.vocabulary == featurizer.vocabulary
    assert_identical(reloaded.transform(texts + UNSEEN), featurizer.transform(texts + UNSEEN))


def test_a_worker_process_can_receive_it():
    featurizer = TfidfFeaturizer(min_df=1).fit(TEXTS)
    assert_identical(pickle.loads(pickle.dumps(featurizer)).transform(TEXTS), featurizer.transform(TEXTS))


def test_damaged_files_are_refused(tmp_path):
    featurizer = TfidfFeaturizer(min_df=1).fit(TEXTS)
    featurizer.save_pretrained(tmp_path)
    vocabulary = tmp_path / "tfidf_vocab.txt"
    vocabulary.write_bytes(vocabulary.read_bytes()[:-5])
    with pytest.raises(ValueError, match="tfidf_vocab.txt.*is not the vocabulary"):
        TfidfFeaturizer.from_pretrained(tmp_path)
    vocabulary.unlink()
    with pytest.raises(FileNotFoundError, match="tfidf_vocab.txt"):
        TfidfFeaturizer.from_pretrained(tmp_path)


def test_no_documents_gives_an_empty_matrix():
    featurizer = TfidfFeaturizer(min_df=1).fit(TEXTS)
    assert featurizer.transform([]).shape == (0, featurizer.num_features)
    assert featurizer.transform([""]).nnz == 0


def test_an_empty_pattern_is_none():
    plain = TfidfFeaturizer(min_df=1).fit(TEXTS)
    assert repr(TfidfFeaturizer(min_df=1, time_pattern="").fit(TEXTS)) == repr(plain)


def test_zero_keeps_all_terms():
    every = TfidfFeaturizer(min_df=1, max_features=None).fit(TEXTS)
    assert TfidfFeaturizer(min_df=1, max_features=0).fit(TEXTS).vocabulary == every.vocabulary


def test_errors_name_the_input_and_the_way_out():
    with pytest.raises(ValueError, match="no texts.*at least one document"):
        TfidfFeaturizer().fit([])
    with pytest.raises(ValueError, match="3 or more of the 2 texts.*Lower `min_df`"):
        TfidfFeaturizer().fit(["one two", "one two"])
    for texts in (["", "a", "?!"], [""]):
        with pytest.raises(ValueError, match="check that the texts have words"):
            TfidfFeaturizer(min_df=1).fit(texts)
    with pytest.raises(ValueError, match="not fitted"):
        TfidfFeaturizer().transform(["text"])
    with pytest.raises(ValueError, match="not fitted"):
        TfidfFeaturizer().save_pretrained("nowhere")
    featurizer = TfidfFeaturizer(min_df=1).fit(TEXTS)
    with pytest.raises(TypeError, match=r"texts\[1\].*NoneType"):
        featurizer.transform(["text", None])
    with pytest.raises(TypeError, match=r"texts\[300\].*float"):
        featurizer.fit(["text"] * 300 + [float("nan")])
    with pytest.raises(TypeError, match=r"Pass a list"):
        featurizer.transform("text")
    with pytest.raises(TypeError, match="read only once"):
        featurizer.fit_transform(text for text in TEXTS)
    with pytest.raises(ValueError, match="`num_threads` must be at least 1, not 0"):
        featurizer.transform(TEXTS, num_threads=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"analyzer": "char"},
        {"ngram_range": (0, 1)},
        {"ngram_range": (2, 1)},
        {"ngram_range": (1,)},
        {"min_df": 0},
        {"min_df": 0.5},
        {"max_features": -1},
        {"lead_words": -1},
        {"lead_words": 2.5},
        {"lead_weight": 0},
        {"lead_weight": float("nan")},
        {"lead_weight": float("inf")},
        {"power": 0},
        {"power": float("nan")},
        {"time_span": 0},
        {"time_weight": float("inf")},
    ],
    ids=str,
)
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=f"`{next(iter(settings))}` is"):
        TfidfFeaturizer(**settings)
