"""
Writes docs/options.md from the declarations of the options.

    python scripts/update_options.py
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from hf_xmc.cli.arguments import DataArguments
from hf_xmc.training.arguments import PARTS, XMCTrainingArguments
from hf_xmc.training.options import default_of, options_of
from hf_xmc.training.presets import METHODS

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
TITLES = {
    "": "General",
    "tfidf_": "TF-IDF",
    "tree_": "Label tree",
    "ranker_": "Linear ranker",
    "knn_": "kNN",
    "encoder_": "Encoder",
    "level_": "Levels",
}
STANDARD = (
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "warmup_steps",
    "lr_scheduler_type",
    "weight_decay",
    "train_sampling_strategy",
)
TEMPLATE = """# Training options

<!-- Written by scripts/update_options.py from the declarations in the code. Do not edit. -->

`XMCTrainingArguments` has the options below and those of
[`transformers.TrainingArguments`](https://huggingface.co/docs/transformers/main_classes/trainer). Recipes and
`hf-xmc train` use the same names. An option that is not set has the value of the [method](methods.md), or else the
default shown here. After construction each option holds the value that is used.

Unknown options, and options that have no effect with the chosen method, are errors.

## Standard options

These options of `TrainingArguments` have their usual meaning. The defaults are those of hf_xmc. The other options of
`TrainingArguments` work as well.

{standard}

{parts}

## Data

Options of recipes and of `hf-xmc train`. In Python they are arguments of `XMCTrainer`.

{data}

## Values of the methods

Values without an option of the same name are part of the method and cannot be set.

| method | values |
|---|---|
{methods}
"""


def main() -> None:
    """Writes the page."""
    PAGE.write_text(render(), encoding="utf-8")


def render() -> str:
    """Returns the text of the page."""
    declared = {field.name: field for field in dataclasses.fields(XMCTrainingArguments)}
    return TEMPLATE.format(
        standard=_table([declared[name] for name in STANDARD]),
        parts="\n\n".join(
            f"## {TITLES[prefix]}\n\n{_table(options_of(part), prefix)}" for prefix, part in PARTS.items()
        ),
        data=_table(list(dataclasses.fields(DataArguments))),
        methods="\n".join(f"| `{method}` | {_preset(method)} |" for method in METHODS),
    )


def _table(fields: list[dataclasses.Field], prefix: str = "") -> str:
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for field in fields:
        help_text = " ".join(str(field.metadata["help"]).split())
        choices = field.metadata.get("choices") or ()
        if not all(re.search(rf"\b{choice}\b", help_text) for choice in choices):
            help_text += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
        default = getattr(default_of(field), "value", default_of(field))  # the value of an enumeration
        cells = [f"`{prefix}{field.name}`", "" if default is None else f"`{default!r}`", help_text.replace("|", "\\|")]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _preset(method: str) -> str:
    values: dict[str, Any] = {}
    for part, options in METHODS[method].items():
        values |= {name if part == "general" else f"{part}_{name}": value for name, value in options.items()}
    return ", ".join(f"`{name}={value!r}`" for name, value in values.items()) or "the defaults"


if __name__ == "__main__":
    main()
