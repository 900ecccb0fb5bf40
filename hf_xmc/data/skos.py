"""Reads thesauri in SKOS, see [`load_vocabulary`]."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec

from ..label_columns import short
from ..vocabulary import LabelEntry, LabelVocabulary
from .streams import plain_error

logger = logging.getLogger(__name__)

# Extension → format, as rdflib names it.
SKOS_FORMATS = {".rdf": "xml", ".xml": "xml", ".ttl": "turtle", ".nt": "nt"}
_SKOS = "http://www.w3.org/2004/02/skos/core#"
_TYPE = "http://www.w3.org/1999/02/22-rdf-syntax-ns#type"
_DEPRECATED = "http://www.w3.org/2002/07/owl#deprecated"
_TEXTS = {f"{_SKOS}{name}": name for name in ("prefLabel", "altLabel", "definition", "scopeNote")}
_UNTAGGED = ""


class _Concepts:
    """
    What a SKOS file says about its concepts.

    Only the few statements that are needed are kept: a file of 60,000 concepts has millions.
    """

    def __init__(self) -> None:
        self.concepts: dict[str, None] = {}  # in the order of the file
        self.deprecated: set[str] = set()
        self.broader: dict[str, dict[str, None]] = defaultdict(dict)
        # Kind of text → concept → (language, text).
        self.texts: dict[str, dict[str, list[tuple[str, str]]]] = {name: defaultdict(list) for name in _TEXTS.values()}

    def add(self, subject: Any, predicate: str, value: Any) -> None:
        """Takes a statement."""
        if predicate in _TEXTS:
            if hasattr(value, "language"):  # a literal; a note may also be a resource
                text = " ".join(str(value).split())
                self.texts[_TEXTS[predicate]][str(subject)].append(((value.language or _UNTAGGED).lower(), text))
        elif predicate == f"{_SKOS}broader":
            self.broader[str(subject)][str(value)] = None
        elif predicate == f"{_SKOS}narrower":
            self.broader[str(value)][str(subject)] = None
        elif predicate == _TYPE:
            if str(value) == f"{_SKOS}Concept":
                self.concepts[str(subject)] = None
        elif predicate == _DEPRECATED and str(value).lower() in ("true", "1"):
            self.deprecated.add(str(subject))


def read_skos(path: Path, language: str | Sequence[str] | None) -> LabelVocabulary:
    """Reads a SKOS file, see [`load_vocabulary`]."""
    found = _parse(path)
    labels = [concept for concept in found.concepts if concept not in found.deprecated]
    if not labels:
        raise ValueError(f"`{path}` has no concept (`skos:Concept`) that is not deprecated. Is it a SKOS vocabulary?")
    languages = _choose_languages(path, found, labels, language)

    def texts(kind: str, label: str) -> list[str]:
        """The texts of a concept in the languages, the first of them first; those without a language at the end."""
        own = found.texts[kind].get(label, ())
        return [text for wanted in (*languages, None) for tag, text in own if text and _fits(tag, wanted)]

    outside: dict[str, str] = {}
    entries = {}
    for label in labels:
        names = texts("prefLabel", label)
        parents = []
        for parent in found.broader.get(label, ()):
            if parent in found.concepts and parent not in found.deprecated:
                parents.append(parent)
            else:
                outside[parent] = label
        description = " ".join(dict.fromkeys([*texts("definition", label), *texts("scopeNote", label)]))
        synonyms = dict.fromkeys([*names[1:], *texts("altLabel", label)])
        name = names[0] if names else ""
        entries[label] = LabelEntry(
            name, tuple(other for other in synonyms if other != name), description, tuple(parents)
        )
    if outside:
        parent, label = next(iter(outside.items()))
        logger.warning(
            "`%s`: %d parents are not in the file, or deprecated, and are left out, such as %s of %s.",
            path, len(outside), short(parent), short(label),
        )  # fmt: skip
    try:
        return LabelVocabulary(entries)
    except ValueError as error:
        raise ValueError(f"`{path}`: {error}") from error


def _parse(path: Path) -> _Concepts:
    try:
        from rdflib import Graph
    except ImportError as error:
        raise ImportError(
            f"Reading `{path}` needs rdflib, which is not installed: pip install hf-xmc[skos]."
        ) from error
    found = _Concepts()

    class Kept(Graph):
        """A graph that keeps nothing but the concepts."""

        def add(self, triple: Any) -> Any:
            found.add(triple[0], str(triple[1]), triple[2])
            return self

    extension = next(suffix for suffix in reversed(path.suffixes) if suffix.lower() in SKOS_FORMATS).lower()
    try:
        with fsspec.open(str(path), "rb", compression="infer") as file:
            Kept().parse(file, format=SKOS_FORMATS[extension], publicID="")
    except MemoryError:
        raise
    except Exception as error:  # the parsers raise anything
        kind = SKOS_FORMATS[extension]
        raise ValueError(
            f"`{path}` cannot be read as {kind} ({str(plain_error(error)).strip():.300}). The file is damaged or has "
            "the wrong extension."
        ) from error
    return found


def _fits(tag: str, wanted: str | None) -> bool:
    """Whether a text with a language tag is in a language: `en-gb` is English. `None` is the text without a tag."""
    return tag == _UNTAGGED if wanted is None else tag == wanted or tag.startswith(f"{wanted}-")


def _choose_languages(
    path: Path, found: _Concepts, labels: Sequence[str], language: str | Sequence[str] | None
) -> list[str]:
    """The languages to read; raises if the file does not have one of them."""
    tags: Counter = Counter()
    for label in labels:
        tags.update({tag for tag, _ in found.texts["prefLabel"].get(label, ())})
    if not tags:
        raise ValueError(f"`{path}` has no names of concepts (`skos:prefLabel`).")
    listed = ", ".join(f"{tag or 'no language'} ({count:,})" for tag, count in tags.most_common())
    if language is None:
        tagged = [tag for tag in tags if tag != _UNTAGGED]
        if len(tagged) <= 1:
            return tagged
        if not any(_fits(tag, "en") for tag in tags):
            raise ValueError(
                f"`{path}` has names in several languages, but not in English: {listed}. Choose one with "
                "`load_vocabulary(..., language=...)` (`--label-language`)."
            )
        return ["en"]
    wanted = [code.lower() for code in ([language] if isinstance(language, str) else language)]
    for code in wanted:
        if not any(_fits(tag, code) for tag in tags):
            raise ValueError(f"`{path}` has no names in the language {code!r}. It has names in {listed}.")
    return wanted
