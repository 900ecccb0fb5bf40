"""Options of the commands: recipes, flags and what they share."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from datasets import Dataset, DatasetDict
from transformers import AutoModel, HfArgumentParser
from transformers.utils import CONFIG_NAME

from ..data import load_sample, load_xmc_dataset
from ..data.readers import join_splits, split_names
from ..modeling_utils import PredictMixin
from ..serialization import resolve_file

DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class DataArguments:
    """
    What data a model is trained on.

    Args:
        dataset (`str`, *optional*):
            Folder, file or id on the Hub, see [`load_xmc_dataset`]; `sample` is the set inside the package.
        column_mapping (`dict` or `str`, *optional*):
            The data's column → `text`, `labels`, `feature_ids` or `feature_values`; as JSON on the command line.
        label_delimiter (`str`, *optional*):
            What separates labels in a column of strings.
        label_texts (`bool`, *optional*, defaults to `False`):
            Whether to read the labels' own texts from the folder (`labels.parquet` or `output-items.txt`).
        train_split (`str`, *optional*, defaults to `"train"`):
            Split to train on, or several: `train+validation` once all options are chosen.
        validation_split (`str`, *optional*):
            Split that training may look at: to follow its progress, to stop early, to weigh heads and ranker.
        eval_split (`str`, *optional*):
            Split to measure on afterwards.
    """

    dataset: str | None = field(
        default=None, metadata={"help": "Folder, file or Hub id; `sample` is the set inside the package."}
    )
    column_mapping: dict | str | None = field(
        default=None, metadata={"help": 'The data\'s columns as JSON: {"title": "text", "subjects": "labels"}.'}
    )
    label_delimiter: str | None = field(default=None, metadata={"help": "What separates labels in a string column."})
    label_texts: bool = field(default=False, metadata={"help": "Read the labels' texts from the folder."})
    train_split: str = field(default="train", metadata={"help": "Split to train on, or several: train+validation."})
    validation_split: str | None = field(
        default=None, metadata={"help": "Split that training may look at to choose what it can choose."}
    )
    eval_split: str | None = field(default=None, metadata={"help": "Split to measure on after training."})

    def __post_init__(self) -> None:
        if not self.dataset:
            raise ValueError(
                "There is no data to train on: write `dataset: ...` in the recipe or give `--dataset PATH`."
            )
        if isinstance(self.column_mapping, str):
            self.column_mapping = parse_mapping(self.column_mapping)
        for option in ("validation_split", "eval_split"):
            self._check_unseen(option)

    def _check_unseen(self, option: str) -> None:
        """Refuses to judge a model by documents that it is trained on."""
        given = getattr(self, option)
        shared = set(split_names(given)) & set(split_names(self.train_split)) if given else set()
        if shared:
            raise ValueError(
                f"`train_split: {self.train_split}` and `{option}: {given}` share {', '.join(sorted(shared))}: what a "
                f"model is trained on says nothing about its quality. Change one of them; --{option} '' is none."
            )

    def load(self, split: str) -> Dataset:
        """One split of the data."""
        assert self.dataset is not None and not isinstance(self.column_mapping, str)
        return load_split(self.dataset, split, self.column_mapping, self.label_delimiter)


def load_split(
    path: str,
    split: str | None,
    column_mapping: dict[str, str] | None = None,
    label_delimiter: str | None = None,
    require_labels: bool = True,
) -> Dataset:
    """One split of a dataset, which may be the bundled sample."""
    if path == "sample":
        splits = load_sample()
        if column_mapping or label_delimiter:
            raise ValueError("The sample has its columns already: it takes no column mapping and no delimiter.")
        names = split_names(str(split))
        if not set(names) <= set(splits):
            raise ValueError(f"The sample has no split `{split}`; it has {', '.join(splits)}.")
        return join_splits({name: splits[name] for name in names})
    loaded = load_xmc_dataset(
        path, split, column_mapping=column_mapping, label_delimiter=label_delimiter, require_labels=require_labels
    )
    if isinstance(loaded, DatasetDict):
        if len(loaded) > 1:
            raise ValueError(f"`{path}` has the splits {', '.join(loaded)}. Choose one with `--split`.")
        (loaded,) = loaded.values()
    return loaded


def load_model(name_or_path: str, dtype: str | None = None) -> Any:
    """Loads a trained model or ensemble from a folder or the Hub, in the given precision."""
    resolve_file(name_or_path, CONFIG_NAME)
    model = AutoModel.from_pretrained(name_or_path, **({} if dtype is None else {"dtype": dtype}))
    if not isinstance(model, PredictMixin):
        raise ValueError(f"`{name_or_path}` is a {type(model).__name__}, no model of hf_xmc.")
    return model


def parse_mapping(text: str) -> dict[str, str]:
    """A column mapping from JSON."""
    try:
        mapping = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f'The column mapping {text!r} is not JSON ({error}). Write \'{{"title": "text"}}\'.'
        ) from error
    if not isinstance(mapping, dict):
        raise ValueError(f'The column mapping {text!r} is no mapping. Write \'{{"title": "text"}}\'.')
    return mapping


class RecipeParser(HfArgumentParser):
    """
    Reads dataclasses from a recipe (flat YAML of their field names) and from flags, which win.

    Args:
        dataclass_types (`Sequence[type]`):
            The dataclasses.
        kwargs:
            Passed to `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: Sequence[type], **kwargs: Any) -> None:
        # Not the default formatter of the base class: an option's default may come from the recipe or the method.
        options: dict[str, Any] = {"allow_abbrev": False, "formatter_class": argparse.HelpFormatter, **kwargs}
        super().__init__(list(dataclass_types), **options)  # type: ignore[arg-type]
        self.add_argument("--config", metavar="RECIPE", help="Recipe: a YAML file of these options.")

    def parse(self, argv: Sequence[str]) -> tuple[Any, ...]:
        """The dataclasses, filled."""
        recipe, rest = argparse.ArgumentParser(add_help=False, allow_abbrev=False), list(argv)
        recipe.add_argument("--config")
        path = recipe.parse_known_args(rest)[0].config
        flags = [] if path is None else self._recipe_flags(path)
        namespace, unknown = self.parse_known_args([*flags, *rest])
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            raise ValueError(f"`{unknown[0]}` is no option.{closest(unknown[0].split('=')[0], known)}")
        values = vars(namespace)
        return tuple(
            kind(**{found.name: values[found.name] for found in fields(kind) if found.init})
            for kind in self.dataclass_types
        )

    def error(self, message: str) -> NoReturn:
        """Raises; the base class would print the usage of all options, a page or two, before it exits."""
        raise ValueError(message)

    def _recipe_flags(self, path: str) -> list[str]:
        """The recipe as flags, so that values are checked alike wherever they come from."""
        names = [found.name for kind in self.dataclass_types for found in fields(kind) if found.init]
        flags: list[str] = []
        for key, value in read_recipe(path, names).items():
            if isinstance(value, list):
                flags += [f"--{key}", *map(str, value)]
            elif value is not None:
                flags.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
        return flags


def read_recipe(path: str, names: Iterable[str]) -> dict[str, Any]:
    """
    Reads a recipe.

    Args:
        path (`str`):
            YAML file.
        names (`Iterable[str]`):
            The keys it may have.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no recipe `{path}`.")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"`{path}` is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` is no recipe: write one `name: value` per line.")
    names = list(names)
    for key in content:
        if key not in names:
            raise ValueError(f"`{path}` has the key `{key}`, which is no option.{closest(str(key), names)}")
    return content


def closest(name: str, names: Iterable[str]) -> str:
    """A hint at the name that was meant, where there is one."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean `{close[0]}`?" if close else ""
