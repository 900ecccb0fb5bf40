"""Language and length of texts, for the defaults of TF-IDF."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from statistics import median

# Frequent words of languages with a Snowball stemmer that are rare in the others.
_FREQUENT_WORDS = {
    "danish": "af og ikke til den som på der blev efter også være har hos mellem",
    "dutch": "de het een van niet met voor zijn aan door wordt naar ook uit worden",
    "english": "the of and to in is for with by that from this are which was",
    "finnish": "ja on ei että se oli ovat tai myös kuin mutta hän joka sekä vuoden",
    "french": "le la les des et du est dans pour une sur par que au avec",
    "german": "der die und das von zu den mit für ist im eine auf des nicht",
    "hungarian": "a az és hogy nem egy is meg ez volt csak már mint vagy lehet",
    "italian": "il di che della per una sono dei con del nella gli alla delle anche",
    "norwegian": "og av ikke til som på er det med har fra ble etter også være",
    "portuguese": "o de que do da em para uma com não os no dos pela são",
    "romanian": "și de în la cu pe din este pentru care nu mai sau prin fost",
    "russian": "и в не на что с по как это из для его от или был",
    "spanish": "el de que los del las para una con por su como más se no",
    "swedish": "och att det som en på är av för med inte till ett har den",
    "turkish": "ve bir bu için ile da de olarak daha çok olan gibi sonra kadar ise",
}
# The first words of texts, and the median number of words from which texts are long.
LEAD_WORDS, LONG_TEXT = 150, 300
# Texts that are read, and the share of frequent words from which a language is believed.
_NUM_TEXTS, _LEAST_SHARE = 1000, 0.08


def _sample(texts: Sequence[str]) -> list[str]:
    step = max(1, len(texts) // _NUM_TEXTS)
    return [texts[row] for row in range(0, len(texts), step)]


def default_lead_words(texts: Sequence[str]) -> int:
    """Returns how many first words get features of their own: some of long texts, which often begin with a title."""
    lengths = [len(re.findall(r"\w\w+", text)) for text in _sample(texts)]
    return LEAD_WORDS if lengths and median(lengths) >= LONG_TEXT else 0


def detect_language(texts: Sequence[str]) -> str | None:
    """
    Returns the language of texts, or `None` if it is not clear or has no Snowball stemmer; about 1,000 texts are read.
    """
    words: Counter[str] = Counter()
    for text in _sample(texts):
        words.update(re.findall(r"[^\W\d_]+", text[:2000].lower()))
    total = sum(words.values())
    shares = {
        language: sum(words[word] for word in frequent.split()) / max(total, 1)
        for language, frequent in _FREQUENT_WORDS.items()
    }
    (best, share), (_, second) = sorted(shares.items(), key=lambda item: -item[1])[:2]
    return best if share >= _LEAST_SHARE and share > 1.3 * second else None
