"""Tests of hf_xmc.tfidf against scikit-learn."""

from __future__ import annotations

import json
import re
import weakref
from collections import Counter, deque

import numpy as np
import pytest
from conftest import refused, refused_each
from datasets import Dataset
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize

from hf_xmc.serialization import load_tensors, save_tensors
from hf_xmc.tfidf import TFIDF_FILE, TfidfFeaturizer

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
    *({"ngram_range": n} for n in [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]),
    {"ngram_range": (1, 2), "min_df": 2},
    *({"analyzer": "char_wb", "ngram_range": n} for n in [(1, 1), (1, 3), (3, 5), (5, 5), (2, 12)]),
    {"analyzer": "char_wb", "ngram_range": (2, 4), "min_df": 2},
]


def random_texts(number: int, words: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    names = ["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(1, 9))) for _ in range(words)]
    return [" ".join(names[i] for i in rng.zipf(1.3, rng.integers(0, 60)) % words) for _ in range(number)]


def check_equals_sklearn(fit_on: list[str], texts: list[str], **settings) -> TfidfFeaturizer:
    settings = {"min_df": 1, **settings}
    ours = TfidfFeaturizer(**settings, max_features=None).fit(fit_on)
    theirs = TfidfVectorizer(**settings, sublinear_tf=True).fit(fit_on)
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
    monkeypatch.setattr(TfidfFeaturizer, "chunk_size", 40_000)
    texts = random_texts(1500, 20_000)
    featurizer = check_equals_sklearn(texts, random_texts(300, 20_000, seed=1) + texts[:300], **settings)
    assert featurizer.num_features > 20_000


@pytest.mark.parametrize("analyzer, pattern", [("word", r"\b\w\w+\b"), ("char_wb", r"\S")])
def test_every_code_point_is_classed_as_python_does(analyzer, pattern):
    text = " ".join(f"{chr(code)}0" for code in (*range(0x32000), *range(0xE0000, 0xE0200)))
    featurizer = TfidfFeaturizer(analyzer=analyzer, ngram_range=(1, 1), min_df=1, max_features=None).fit([text])
    assert set(featurizer.vocabulary) - {" "} == set(re.findall(pattern, text.lower()))


@pytest.mark.parametrize("words", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    "settings", [{}, {"ngram_range": (1, 3)}, {"analyzer": "char_wb", "ngram_range": (1, 3)}], ids=str
)
def test_first_words_have_columns_of_their_own(settings, words):
    settings = {"analyzer": "word", "min_df": 1, "ngram_range": (1, 2), **settings}
    texts = TEXTS + UNSEEN
    ours = TfidfFeaturizer(**settings, max_features=None, lead_words=words).fit(TEXTS)
    theirs = TfidfVectorizer(**settings, sublinear_tf=True).fit(TEXTS)
    word = re.compile(r"\b\w\w+\b" if settings["analyzer"] == "word" else r"\S+")
    leads = [" ".join(word.findall(text.lower())[:words]) for text in texts]
    expected = np.hstack([theirs.transform(texts).toarray(), 0.7 * theirs.transform(leads).toarray()])
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    expected /= np.where(lengths == 0, 1, lengths)
    found = ours.transform(texts)
    assert ours.vocabulary == theirs.get_feature_names_out().tolist()
    assert found.shape == (len(texts), ours.num_features) == expected.shape
    np.testing.assert_allclose(found.toarray(), expected, rtol=1e-5)
    assert all((np.diff(row.indices) > 0).all() for row in found)


@pytest.mark.parametrize(
    "settings", [{}, {"analyzer": "char_wb", "ngram_range": (2, 3)}, {"stemmer": "french"}], ids=str
)
def test_accents_are_stripped(settings, tmp_path):
    texts = ["Élève à l'école ENTIÈRE", "Crème brûlée e\u0301le\u0300ve", "한국어 Ångström ñandú", "naïve œuvre"]
    bare = ["Eleve a l'ecole ENTIERE", "Creme brulee eleve", "한국어 Angstrom nandu", "naive œuvre"]
    ours = TfidfFeaturizer(**settings, strip_accents=True).fit(texts)
    theirs = TfidfFeaturizer(**settings).fit(bare)
    assert ours.vocabulary == theirs.vocabulary
    np.testing.assert_array_equal(ours.transform(texts).toarray(), theirs.transform(bare).toarray())
    ours.save_pretrained(tmp_path)
    loaded = TfidfFeaturizer.from_pretrained(tmp_path)
    np.testing.assert_array_equal(loaded.transform(bare).toarray(), loaded.transform(texts).toarray())


@pytest.mark.parametrize(
    "settings", [{}, {"analyzer": "char_wb", "ngram_range": (1, 3)}, {"stemmer": "english"}], ids=str
)
def test_first_lines_have_columns_of_their_own(settings):
    """As many first words as the line has give the same row."""
    texts = ["Solar energies\nwind energy and solar energy", "\nwind alone", "one line of solar wind", "a title\n", ""]
    texts += [
        f"{title}\n{text}\n{title}" for title, text in zip(random_texts(20, 50), random_texts(20, 60), strict=True)
    ]
    featurizer = TfidfFeaturizer(**settings, lead_words=-1).fit(texts)
    found = featurizer.transform(texts).toarray()
    word = re.compile(r"\S+" if settings.get("analyzer") == "char_wb" else r"\b\w\w+\b")
    for row, text in zip(found, texts, strict=True):
        words = len(word.findall(text.split("\n")[0]))
        same = TfidfFeaturizer(**settings, lead_words=words or 1).fit(texts).transform([text]).toarray()[0]
        if not words:  # no title: the first part alone
            same[len(featurizer.vocabulary) :] = 0
            same /= np.linalg.norm(same) or 1
        np.testing.assert_allclose(row, same, rtol=1e-5)


def test_a_document_whose_first_words_are_unknown_has_the_other_part_alone():
    featurizer = TfidfFeaturizer(min_df=1, lead_words=1).fit(["known words"])
    np.testing.assert_allclose(featurizer.transform(["strange words"]).toarray(), [[0, 0, 1, 0, 0, 0]])


@pytest.mark.parametrize("power", [0.5, 1.25, 2])
def test_weights_are_raised_to_a_power_in_each_part(power):
    settings = {"min_df": 1, "ngram_range": (1, 2)}
    ours = TfidfFeaturizer(**settings, lead_words=3, power=power).fit(TEXTS)
    theirs = TfidfVectorizer(**settings, sublinear_tf=True).fit(TEXTS)
    leads = [" ".join(re.findall(r"\b\w\w+\b", text.lower())[:3]) for text in TEXTS]
    whole, lead = (normalize(theirs.transform(texts).toarray() ** power) for texts in (TEXTS, leads))
    expected = normalize(np.hstack([whole, 0.7 * lead]))
    np.testing.assert_allclose(ours.transform(TEXTS).toarray(), expected, rtol=1e-5)


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
        monkeypatch.setattr(TfidfFeaturizer, "chunk_size", chunk)
        for workers in (1, 2, 5, None):
            featurizer = TfidfFeaturizer(**settings).fit(texts, workers)
            assert featurizer.vocabulary == first.vocabulary
            assert_identical(featurizer.transform(texts, workers), expected)


def test_texts_are_any_iterable_and_are_streamed(monkeypatch):
    monkeypatch.setattr(TfidfFeaturizer, "chunk_size", 100)
    texts = random_texts(300, 100)
    featurizer = TfidfFeaturizer().fit(texts)
    expected = featurizer.transform(texts)
    column = Dataset.from_dict({"text": texts})["text"]
    for source in (tuple(texts), column, deque(texts), np.array(texts), iter(texts), (text for text in texts)):
        assert_identical(featurizer.transform(source), expected)
    assert TfidfFeaturizer().fit(iter(texts)).vocabulary == featurizer.vocabulary
    assert_identical(TfidfFeaturizer().fit_transform(column), expected)

    class Text(str):
        """A text that can be counted while it is in memory."""

    alive, most = weakref.WeakSet(), 0

    def source():
        nonlocal most
        for text in texts:
            alive.add(read := Text(text))
            most = max(most, len(alive))
            yield read

    assert_identical(featurizer.transform(source(), num_threads=2), expected)
    assert 0 < most < len(set(texts)) / 4


@pytest.mark.parametrize(
    "settings",
    [{}, {"analyzer": "char_wb", "ngram_range": (2, 4)}, {"lead_words": 3, "power": 1.25}, {"lead_words": -1}],
    ids=str,
)
def test_saved_and_reloaded_it_gives_identical_matrices(settings, tmp_path):
    texts = [*TEXTS, "lone \ud83d\ude00 surrogates \ud83d \ude00\ud83d"]
    featurizer = TfidfFeaturizer(min_df=1, max_features=None, **settings).fit(texts)
    featurizer.save_pretrained(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["tfidf.safetensors", "tfidf_vocab.txt"]
    reloaded = TfidfFeaturizer.from_pretrained(tmp_path / "model")
    assert repr(reloaded) == repr(featurizer)
    assert reloaded.vocabulary == featurizer.vocabulary
    assert_identical(reloaded.transform(texts + UNSEEN), featurizer.transform(texts + UNSEEN))


def test_damaged_files_are_refused(tmp_path):
    featurizer = TfidfFeaturizer(min_df=1).fit(TEXTS)
    featurizer.save_pretrained(tmp_path)
    vocabulary = tmp_path / "tfidf_vocab.txt"
    content = vocabulary.read_bytes()
    for damaged in (content[:-5], content.replace(b"dog", b"fog")):
        vocabulary.write_bytes(damaged)
        refused("tfidf_vocab.txt", TfidfFeaturizer.from_pretrained, tmp_path)
    vocabulary.unlink()
    refused("tfidf_vocab.txt", TfidfFeaturizer.from_pretrained, tmp_path, error=FileNotFoundError)


def test_no_documents_gives_an_empty_matrix():
    featurizer = TfidfFeaturizer(min_df=1).fit(TEXTS)
    assert featurizer.transform([]).shape == (0, featurizer.num_features)
    assert featurizer.transform([""]).nnz == 0


def save_as_version_0_1(featurizer, folder, **changes):
    """Saves with the settings that version 0.1 wrote."""
    featurizer.save_pretrained(folder)
    tensors, metadata = load_tensors(folder / TFIDF_FILE, "tfidf")
    settings = json.loads(metadata["settings"]) | {"time_pattern": None, "time_span": 1.0, "time_weight": 0.5}
    metadata["settings"] = json.dumps(settings | changes)
    save_tensors(folder / TFIDF_FILE, tensors, "tfidf", metadata)


@pytest.mark.parametrize("changes", [{}, {"sublinear_tf": False}, {"lowercase": False}], ids=str)
def test_files_of_version_0_1(changes, tmp_path):
    featurizer = TfidfFeaturizer(min_df=1).fit(TEXTS)
    save_as_version_0_1(featurizer, tmp_path, **changes)
    options = {"sublinear_tf": True, "min_df": 1, "ngram_range": (1, 2), "vocabulary": featurizer.vocabulary}
    reference = TfidfVectorizer(**options | changes).fit([text.lower() for text in TEXTS])
    loaded = TfidfFeaturizer.from_pretrained(tmp_path)
    loaded.save_pretrained(tmp_path / "again")
    for found in (loaded, TfidfFeaturizer.from_pretrained(tmp_path / "again")):
        np.testing.assert_allclose(
            found.transform(TEXTS + UNSEEN).toarray(), reference.transform(TEXTS + UNSEEN).toarray(), rtol=1e-5
        )


def test_features_by_date_of_version_0_1_are_refused(tmp_path):
    save_as_version_0_1(TfidfFeaturizer(min_df=1).fit(TEXTS), tmp_path, time_pattern=r"(?P<year>\d{4})")
    refused(r"time_pattern.*0\.1\.0", TfidfFeaturizer.from_pretrained, tmp_path)


def test_zero_keeps_all_terms():
    every = TfidfFeaturizer(min_df=1, max_features=None).fit(TEXTS)
    assert TfidfFeaturizer(min_df=1, max_features=0).fit(TEXTS).vocabulary == every.vocabulary


def test_errors_name_the_input():
    with pytest.raises(ValueError, match="no texts"):
        TfidfFeaturizer().fit([])
    with pytest.raises(ValueError, match="min_df"):
        TfidfFeaturizer(min_df=3).fit(["one two", "one two"])
    for texts in (["", "a", "?!"], [""]):
        with pytest.raises(ValueError, match="analyzer"):
            TfidfFeaturizer(min_df=1).fit(texts)
    for use in (lambda: TfidfFeaturizer().transform(["text"]), lambda: TfidfFeaturizer().save_pretrained("nowhere")):
        refused("not fitted", use)
    featurizer = TfidfFeaturizer(min_df=1).fit(TEXTS)
    refused(r"texts\[1\].*NoneType", featurizer.transform, ["text", None], error=TypeError)
    refused(r"texts\[300\].*float", featurizer.fit, ["text"] * 300 + [float("nan")], error=TypeError)
    refused("texts", featurizer.transform, "text", error=TypeError)
    refused("texts", featurizer.fit_transform, (text for text in TEXTS), error=TypeError)
    refused("num_threads", featurizer.transform, TEXTS, num_threads=0)


def test_settings_are_checked():
    refused_each(TfidfFeaturizer, analyzer="char", ngram_range=(0, 1), min_df=0, max_features=-1, lead_words=-2)
    refused_each(TfidfFeaturizer, ngram_range=(2, 1), min_df=0.5, lead_words=2.5, power=0)
    refused_each(TfidfFeaturizer, ngram_range=(1,), power=float("nan"))
    refused_each(TfidfFeaturizer, power=float("inf"))
