from __future__ import annotations

import math
import re

import numpy as np
import pytest
from datasets import Dataset
from sklearn.feature_extraction.text import TfidfVectorizer

from hf_xmc import XMCForTextClassification, XMCTrainer, XMCTrainingArguments
from hf_xmc.document_times import NUM_COLUMNS, compile_time_pattern, read_time, time_features
from hf_xmc.tfidf import TfidfFeaturizer

DATE = r"(?P<month>[A-Za-z]+) (?P<year>\d{4})"
TEXTS = [
    "Council Decision of May 1970 on rice and sugar",
    "Commission Regulation of August 1970 on rice",
    "Council Regulation of January 1998 on sugar, sugar and milk",
    "rice without a date",
    "",
    "March 2001",
]


@pytest.mark.parametrize(
    ("pattern", "text", "time"),
    [
        (DATE, "Decision of 27 May 1970", 1970 + 4 / 12),
        (DATE, "OF 21 DECEMBER 1998", 1998 + 11 / 12),
        (DATE, "Sept 2001, amended in Jan 2005", 2001 + 8 / 12),
        (DATE, "No 1974 of the year 1980, signed in June 1981", 1981 + 5 / 12),  # neither "No" nor "year" is a month
        (DATE, "nothing", math.nan),
        (r"(?P<year>\d{4})-(?P<month>\d+)", "2013-13 or 2013-02-03", 2013 + 1 / 12),
        (r"(?P<year>\d+)", "123456 and 7 and 1999", 7),
        (r"(?P<year>(?:19|20)\d\d)", "in 1999", 1999),
        (r"(?P<year>\d{4})(?:/(?P<month>\d\d))?", "1999", 1999),
        (r"year(?P<year>\d{4})?", "year or year2002", 2002),
    ],
)
def test_the_first_match_that_is_a_date_is_the_time_of_a_document(pattern, text, time):
    np.testing.assert_allclose(read_time(text, compile_time_pattern(pattern)), time)


@pytest.mark.parametrize("pattern", ["(?P<year>", r"\d{4}", "(?P<month>x)", 1998])
def test_a_pattern_without_a_year_is_refused(pattern):
    with pytest.raises(ValueError, match="`time_pattern` is"):
        TfidfFeaturizer(time_pattern=pattern)


def shared(first: float, second: float, span: float = 1.0) -> float:
    """How much two documents with one and the same term share, by their times."""
    times = np.array([first, second])
    rows = time_features(np.array([0, 1]), np.array([3, 3]), np.array([0.2, 5.0]), times, span)
    return float((rows @ rows.T)[0, 1])


def test_documents_share_less_the_further_apart_they_are():
    for time in (1998, 1998.25, 1998.5, 1998.9, 7):
        assert shared(time, time) == pytest.approx(1)
        assert 0.49 < shared(time, time + 1) < 0.7
        near, far = shared(time, time + 0.4), shared(time, time + 2)
        assert 0.8 < near < 1
        assert 0 <= far < 0.25
        assert shared(time, time + 3.1) == 0
        assert shared(time, time + 1, span=10) > 0.98
        assert shared(time, time + 0.8, span=0.25) == 0


@pytest.mark.parametrize(("time", "span"), [(0, 1.0), (0.4, 1.0), (1998, 1e6), (1998, 1e-7)])
def test_terms_stay_apart_whatever_the_numbers_of_their_moments(time, span):
    rows = time_features(np.array([0, 1]), np.array([3, 4]), np.ones(2), np.full(2, float(time)), span)
    np.testing.assert_allclose((rows @ rows.T).toarray(), np.eye(2), atol=1e-6)


def test_other_terms_and_documents_without_time_share_nothing():
    documents, terms = np.array([0, 1, 2]), np.array([3, 4, 3])
    rows = time_features(documents, terms, np.ones(3), np.array([1998.0, 1998, np.nan]), 1.0)
    assert rows.shape == (3, NUM_COLUMNS)
    np.testing.assert_allclose((rows @ rows.T).toarray(), np.diag([1, 1, 0]), atol=1e-6)
    assert time_features(documents[:0], terms[:0], np.ones(0), np.array([np.nan]), 1.0).nnz == 0


def slow_kernel(times: list[float], span: float) -> np.ndarray:
    """What documents share by their times: every moment of many centuries, one by one."""
    moments = [span * number for number in range(int(2100 / span))]
    shares = np.zeros((len(times), len(moments)))
    for i, time in enumerate(times):
        for j, moment in enumerate(moments):
            distance = abs(time - moment) / (1.5 * span)
            if distance < 1:
                shares[i, j] = math.cos(distance * math.pi / 2)
    lengths = np.linalg.norm(shares, axis=1, keepdims=True)
    shares /= np.where(lengths == 0, 1, lengths)
    return shares @ shares.T


@pytest.mark.parametrize("span", [0.5, 1.0, 7.0])
@pytest.mark.parametrize("lead_words", [0, 6])
@pytest.mark.parametrize(
    "settings", [{"ngram_range": (1, 2)}, {"analyzer": "char_wb", "ngram_range": (2, 3)}], ids=str
)
def test_similarity_of_rows_is_that_of_their_terms_times_that_of_their_times(settings, lead_words, span):
    weight = 0.6
    times = {"time_pattern": DATE, "time_span": span, "time_weight": weight}
    plain = TfidfFeaturizer(min_df=1, lead_words=lead_words, **settings).fit(TEXTS)
    ours = TfidfFeaturizer(min_df=1, lead_words=lead_words, **settings, **times).fit(TEXTS)
    # Of n-grams only the shortest are paired with times; idf and vocabulary are those of all of the text.
    word = re.compile(r"\b\w\w+\b" if "analyzer" not in settings else r"\S+")
    leads = [" ".join(word.findall(text.lower())[: lead_words or None]) for text in TEXTS]
    shortest = TfidfVectorizer(
        min_df=1,
        sublinear_tf=True,
        analyzer=settings.get("analyzer", "word"),
        ngram_range=(settings["ngram_range"][0],) * 2,
    )
    terms = shortest.fit(TEXTS).transform(leads).toarray()
    dates = [1970 + 4 / 12, 1970 + 7 / 12, 1998, -1e9, -1e9, 2001 + 2 / 12]
    expected = slow_kernel(dates, span) * (terms @ terms.T)

    found = ours.transform(TEXTS)
    assert found.shape == (len(TEXTS), plain.num_features + NUM_COLUMNS)
    assert ours.num_features == found.shape[1]
    before, pairs = found[:, : plain.num_features].toarray(), found[:, plain.num_features :]
    dated = np.array([True, True, True, False, False, True])
    length = np.where(dated, np.hypot(1, weight), 1)[:, None]
    np.testing.assert_allclose(before * length, plain.transform(TEXTS).toarray(), rtol=1e-5)
    similarity = (pairs @ pairs.T).toarray() * (length @ length.T) / weight**2
    np.testing.assert_allclose(similarity, expected, atol=1e-3)
    assert (np.diff(pairs.indptr) > 0).tolist() == dated.tolist()
    assert all((np.diff(row.indices) > 0).all() for row in found)
    np.testing.assert_allclose(np.linalg.norm(found[dated].toarray(), axis=1), 1, rtol=1e-5)


def test_fitting_refuses_a_pattern_that_finds_no_date():
    with pytest.raises(ValueError, match=r"finds no date in any of the 6 texts. Mend the pattern"):
        TfidfFeaturizer(min_df=1, time_pattern=r"published (?P<year>\d{4})").fit(TEXTS)


def test_a_model_learns_that_the_use_of_a_label_has_changed(tmp_path):
    # The same words in all years: rice is "a" and milk "b" until 1979, and the other way round from 1990 on.
    rows = [
        {"text": f"{word} report of {year}", "labels": [label if year < 1985 else {"a": "b", "b": "a"}[label]]}
        for year in (*range(1970, 1980), *range(1990, 2000))
        for word, label in (("rice", "a"), ("milk", "b"))
        for _ in range(3)
    ]
    asked = ["rice report of 1975", "milk report of 1976", "rice report of 1994", "milk report of 1995"]

    def tags(**options) -> list[str]:
        folder = tmp_path / str(len(options))
        args = XMCTrainingArguments(folder, tfidf_min_df=1, tfidf_ngram_range=[1, 1], report_to="none", **options)
        trainer = XMCTrainer(args=args, train_dataset=Dataset.from_list(rows))
        trainer.train()
        found = [best[0][0] for best in trainer.model.predict(asked, top_k=1)]
        reloaded = XMCForTextClassification.from_pretrained(folder)
        assert [best[0][0] for best in reloaded.predict(asked, top_k=1)] == found
        return found

    assert tags(tfidf_time_pattern=r"of (?P<year>\d{4})", tfidf_time_span=3.0, tfidf_time_weight=2.0) == list("abba")
    assert tags() != list("abba")
