"""Label vocabularies: what is known about labels in words, and their parents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .hierarchy import Hierarchy


@dataclass(frozen=True)
class LabelEntry:
    """
    What a vocabulary says about one label.

    Args:
        name (`str`, *optional*): The preferred name in words; the label itself may be a code.
        synonyms (`tuple[str, ...]`, *optional*): Further names, in any language.
        description (`str`, *optional*): A definition or a longer text.
        parents (`tuple[str, ...]`, *optional*): The broader labels.
    """

    name: str = ""
    synonyms: tuple[str, ...] = ()
    description: str = ""
    parents: tuple[str, ...] = ()


class LabelVocabulary(Mapping[str, LabelEntry]):
    """
    A thesaurus, catalogue or code book: an entry for each label.

    Args:
        entries (`Mapping`):
            For each label its name, a [`LabelEntry`], or a dictionary with the keys `name`, `synonyms`, `description`
            and `parents`, all optional. `text` is another word for `name`. Labels may be numbers. Two labels may have
            the same name.

    Example:

    ```python
    vocabulary = LabelVocabulary({"c_12": "dogs", "c_10": {"name": "pets", "synonyms": ["companion animals"]}})
    vocabulary["c_10"].synonyms
    # ('companion animals',)
    ```
    """

    def __init__(self, entries: Mapping[Any, str | LabelEntry | Mapping[str, Any] | None]) -> None:
        if not isinstance(entries, Mapping):
            raise TypeError(
                f"A vocabulary is a dictionary from labels to names or entries, not {type(entries).__name__}."
            )
        self._entries = {str(label): _make_entry(str(label), entry) for label, entry in entries.items()}
        if len(self._entries) < len(entries):
            twice = Counter(map(str, entries)).most_common(1)[0][0]
            raise ValueError(f"The label {twice!r:.80} is in the vocabulary as text and as number. Drop one.")
        self._check_parents()

    def _check_parents(self) -> None:
        if not self.has_parents:
            return
        positions = {label: i for i, label in enumerate(self)}
        for label, entry in self.items():
            for parent in entry.parents:
                if parent not in positions:
                    raise ValueError(
                        f"The label {label!r:.80} has the parent {parent!r:.80}, which is not in the vocabulary. Add "
                        "an entry for it, or drop it."
                    )
        Hierarchy([[positions[parent] for parent in entry.parents] for entry in self.values()], list(self))

    def __getitem__(self, label: str) -> LabelEntry:
        return self._entries[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"LabelVocabulary({len(self)} labels)"

    @property
    def has_parents(self) -> bool:
        """Whether any entry has parents."""
        return any(entry.parents for entry in self.values())

    def for_labels(self, labels: Iterable[str]) -> LabelVocabulary:
        """
        Returns the vocabulary with its labels as the documents write them.

        That is the vocabulary itself if any of `labels` is in it. Otherwise the documents may have the last parts of
        its URIs (`p12` of `http://www.yso.fi/onto/yso/p12`), the URIs in angle brackets, or the names. The one that
        gives most of `labels` is taken. Entries that would become the same label stay as they are.

        Args:
            labels (`Iterable[str]`): Labels of documents.
        """
        labels = set(labels)
        if not labels.isdisjoint(self._entries):
            return self
        writings = [{label: write(label, entry) for label, entry in self.items()} for write in _WRITINGS]
        best = max(writings, key=lambda written: len(labels.intersection(written.values())))
        if labels.isdisjoint(best.values()):
            return self
        counts = Counter([*best.values(), *self])
        new = {label: text if text and counts[text] == 1 else label for label, text in best.items()}
        return LabelVocabulary(
            {
                new[label]: replace(entry, parents=tuple(new[parent] for parent in entry.parents))
                for label, entry in self.items()
            }
        )

    def parents_among(self, label: str, known: Mapping[str, int]) -> list[int]:
        """Returns the ids of the parents of a label; those of a parent that is not in `known` take its place."""
        found, visited = set(), set()
        waiting = list(self[label].parents) if label in self else []
        while waiting:
            parent = waiting.pop()
            if parent in known:
                found.add(known[parent])
            elif parent not in visited:
                visited.add(parent)
                waiting.extend(self[parent].parents)
        return sorted(found)


_WRITINGS: tuple[Callable[[str, LabelEntry], str], ...] = (
    lambda label, entry: re.split(r"[/#]", label.rstrip("/#"))[-1],
    lambda label, entry: f"<{label}>",
    lambda label, entry: entry.name,
)
_KEYS = (*(declared.name for declared in fields(LabelEntry)), "text")


def _make_entry(label: str, entry: Any) -> LabelEntry:
    """Returns an entry with checked types."""
    if not label:
        raise ValueError("A vocabulary has an empty label. Remove it, or give it an id.")
    if entry is None or isinstance(entry, str):
        return LabelEntry(entry or "")
    if isinstance(entry, LabelEntry):
        entry = {declared.name: getattr(entry, declared.name) for declared in fields(entry)}
    if not isinstance(entry, Mapping):
        raise TypeError(f"The entry of the label {label!r:.80} must be a text or a dictionary, not {entry!r:.80}.")
    unknown = [key for key in entry if key not in _KEYS]
    if unknown or ("text" in entry and "name" in entry):
        problem = f"the unknown key {unknown[0]!r:.80}" if unknown else "both `name` and `text`"
        raise ValueError(f"The entry of the label {label!r:.80} has {problem}. Its keys are {', '.join(_KEYS[:-1])}.")
    texts = {"name": entry.get("name", entry.get("text")), "description": entry.get("description")}
    for key, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"`{key}` of the label {label!r:.80} must be a text, not {value!r:.80}.")
    lists = {key: entry.get(key) or () for key in ("synonyms", "parents")}
    for key, values in lists.items():
        if isinstance(values, str) or not all(value is not None for value in values):
            raise TypeError(f"`{key}` of the label {label!r:.80} must be a list of texts, not {values!r:.80}.")
    return LabelEntry(
        (texts["name"] or "").strip(),
        tuple(dict.fromkeys(text.strip() for text in map(str, lists["synonyms"]) if text.strip())),
        (texts["description"] or "").strip(),
        tuple(dict.fromkeys(map(str, lists["parents"]))),
    )
