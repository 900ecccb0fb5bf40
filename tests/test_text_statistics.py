"""Tests of the defaults of TF-IDF that depend on the texts."""

import pytest

from hf_xmc import XMCTrainingArguments
from hf_xmc.training.text_statistics import LEAD_WORDS, LONG_TEXT, detect_language

SENTENCES = {
    "english": "The quality of the water in this lake is measured by a station that was built for it",
    "german": "Die Qualität des Wassers ist im See nicht gut und wird mit einer Station auf dem Land gemessen",
    "french": "La qualité des eaux du lac est mesurée par une station dans le village, pour que les gens la lisent",
    "finnish": "Järven veden laatu on hyvä ja se mitataan, mutta asema ei ole uusi tai vuoden ikäinen kuin muut",
    "russian": "Качество воды в озере и на реке не было хорошим, это из отчёта для города по экологии",
    None: "CVE-2021-44228 apache:log4j 2.14.1 jndi ldap rce",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_language(language):
    texts = [SENTENCES[language], "", "x1 y2"]
    assert detect_language(texts) == language
    assert XMCTrainingArguments("out").make_tfidf(texts).stemmer == language
    assert XMCTrainingArguments("out", tfidf_analyzer="char_wb").make_tfidf(texts).stemmer is None
    assert XMCTrainingArguments("out", tfidf_stemmer="none").make_tfidf(texts).stemmer is None
    assert XMCTrainingArguments("out", tfidf_stemmer="dutch").make_tfidf(texts).stemmer == "dutch"


@pytest.mark.parametrize("words", [LONG_TEXT - 1, LONG_TEXT])
def test_first_words_of_long_texts(words):
    texts = ["word " * words] * 3 + ["one word"] * 2
    made = {
        name: XMCTrainingArguments("out", method=method, **options).make_tfidf(texts).lead_words
        for name, method, options in [
            ("default", "auto", {}),
            ("method of a paper", "parabel", {}),
            ("given", "xr-linear", {"tfidf_lead_words": 0}),
        ]
    }
    expected = LEAD_WORDS if words == LONG_TEXT else 0
    assert made == {"default": expected, "method of a paper": 0, "given": 0}
    assert XMCTrainingArguments("out", tfidf_lead_words=-1).make_tfidf(texts).lead_words == -1
    assert XMCTrainingArguments("out").make_tfidf([]).lead_words == 0
