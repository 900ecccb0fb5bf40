"""Arguments and help texts of the commands. Imports neither torch nor transformers, so that help is there at once."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

COMMANDS = {
    "train": "train a tagger on a file, a folder or a dataset of the Hub",
    "predict": "tag the documents of files",
    "evaluate": "measure a model on documents with labels",
    "ensemble": "combine several models into one",
    "labels": "add, remove or rename labels of a model, without training it again",
    "card": "write the card of a model",
    "export": "copy a model with the code that loads it",
    "verify": "check the files of a model",
    "push": "upload a model to the Hub",
    "push-dataset": "upload a dataset to the Hub",
    "completion": "print the completion of commands and options for a shell",
}
HELP = """
Trains and runs taggers that choose a few labels for a text out of thousands to millions.

examples:
  hf-xmc train tickets.csv -o my-tagger
  hf-xmc predict my-tagger new.csv --output tags.jsonl
  hf-xmc evaluate my-tagger more.csv
  hf-xmc push my-tagger me/my-tagger
"""
TRAIN_HELP = """\
usage: hf-xmc train DATA -o FOLDER [--OPTION VALUE ...]

Trains a tagger, measures it on a tenth of the documents that is held out, and then trains it on all of them.

DATA is a file (csv, tsv, parquet, jsonl, json, xlsx), a folder with files named train, validation and test, or the id
of a dataset on the Hub; `sample` is the bundled dataset. Columns and separators are found by looking at the data.

options:
  -o, --output FOLDER      where the model is saved
  --encoder NAME           fine-tune this transformer encoder, a folder or an id on the Hub
  --method NAME            xr-linear (default), xr-transformer (default with --encoder), knn, parabel, lightxml, ...
  --text-column NAME ...   column of the texts, or several, such as title abstract
  --label-column NAME      column of the labels
  --label-delimiter TEXT   what separates the labels in it, such as ';'
  --label-texts FILE       names, synonyms and parents of the labels: a table, JSON or SKOS; false for none
  --extend MODEL           add the documents of DATA to this model, which stays as it is
  --previous DATA          with --extend: the data that the model was trained on
  --holdout SHARE          share of the documents to hold out (0.1); 0 for none
  --final-train false      do not train on the documents held out
  --num-train-epochs N     passes over the data in fine-tuning
  --overwrite              replace a model in FOLDER
  --config RECIPE          a YAML file of options; see recipes/sample/xr-transformer.yaml
  --log text|json|none     what is printed during training

examples:
  hf-xmc train tickets.csv -o my-tagger
  hf-xmc train papers.parquet -o my-tagger --text-column abstract --label-column subjects
  hf-xmc train tickets.xlsx --sheet 2025 -o my-tagger --encoder sentence-transformers/all-MiniLM-L6-v2
  hf-xmc train --config recipes/sample/xr-linear.yaml --output my-tagger

`hf-xmc train --help-all` lists all options.
"""
FORMATS = ("jsonl", "parquet")
_PARTS = ("text_tfidf", "centroid_tfidf", "knn_tfidf", "text_vector", "centroid_vector", "knn_vector")
PREDICT_WITH = ("all", "both", "ranker", "heads", *_PARTS)
DTYPES = ("float32", "bfloat16", "float16")
AVERAGES = ("scores", "ranks")
SHELLS = ("bash", "zsh", "fish")
_BATCH_SIZE = 32
_DTYPE_HELP = f"precision of the encoder ({', '.join(DTYPES)}); as saved by default"
_MAPPING = 'JSON: {"title": "text", "subjects": "labels"}'


class Parser(argparse.ArgumentParser):
    """A parser whose flags work with dashes and underscores, and whose errors are exceptions."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments after replacing the underscores in the names of flags."""
        return super().parse_known_args([with_dashes(arg) for arg in args or ()], namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; an unknown flag is an error that names the closest one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            name = unknown[0].split("=")[0]
            self.error(f"`{name}` is not an option.{closest(name, known)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raises an error; the base class would print the usage and exit."""
        end = "" if message.endswith((".", "?")) else "."
        raise ValueError(f"{message}{end} `{self.prog} --help` explains the arguments.")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows an option in one line where possible, and keeps the line breaks of examples."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=118)


def with_dashes(arg: str) -> str:
    """A flag with dashes in its name; anything else as it is."""
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else arg


def closest(name: str, names: Iterable[str]) -> str:
    """A hint at the most similar name, if any."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean `{close[0]}`?" if close else ""


def parse_mapping(text: str) -> dict[str, str]:
    """Reads a column mapping from JSON."""
    try:
        mapping = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f'The column mapping {text!r} is not JSON ({error}). Write \'{{"title": "text"}}\'.'
        ) from error
    if not isinstance(mapping, dict):
        raise ValueError(f'The column mapping {text!r} is not a JSON object. Write \'{{"title": "text"}}\'.')
    return mapping


def make_parser(command: str) -> Parser:
    """The parser of a command; that of `train` is in train.py."""
    add_arguments, description, examples = _PARSERS[command]
    epilog = "examples:\n" + "\n".join(f"  hf-xmc {command} {example}" for example in examples)
    parser = Parser(prog=f"hf-xmc {command}", description=description, epilog=epilog)
    add_arguments(parser)
    return parser


def _add_predict(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id of the model")
    parser.add_argument("input", metavar="INPUT", nargs="+", help="the documents; - for standard input")
    output = "folder for a file per part; one file, .jsonl or .parquet; - for standard output"
    parser.add_argument("--output", "-o", required=True, help=output)
    parser.add_argument("--format", choices=FORMATS, help="of the files in a folder; jsonl by default")
    parser.add_argument("--split", help="split of the input, if it has several")
    text = "column of the texts, or several; by default as in the training"
    parser.add_argument("--text-column", nargs="+", metavar="COL", help=text)
    parser.add_argument("--sheet", help="sheet of an Excel file")
    parser.add_argument(
        "--keep-columns", nargs="+", default=[], metavar="COL", help="columns to write beside the labels, an id say"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="labels per document; that of the model by default")
    parser.add_argument("--threshold", type=float, default=0.0, help="leave out labels with a smaller score")
    names: dict[str, Any] = {"nargs": "+", "metavar": "LABEL"}
    parser.add_argument("--labels", **names, help="choose from these labels only; @FILE reads one per line")
    parser.add_argument("--exclude", **names, help="do not choose these labels; @FILE reads one per line")
    below = "choose from these labels and those below them only; @FILE reads one per line"
    parser.add_argument("--under", **names, help=below)
    parser.add_argument(
        "--level", type=int, metavar="N", help="replace labels below this level of the hierarchy by its labels"
    )
    parser.add_argument("--with-parents", action="store_true", help="add all labels above the predicted ones")
    _add_model_options(parser)
    parser.add_argument("--part-size", type=int, metavar="N", default=16_384, help="documents of a part")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that exists")


def _add_model_options(parser: Parser) -> None:
    parser.add_argument("--beam-size", type=int, help="nodes kept per level; 0 keeps all")
    parser.add_argument("--batch-size", type=int, default=_BATCH_SIZE, help="batch size of the encoder")
    parser.add_argument("--dtype", choices=DTYPES, metavar="DTYPE", help=_DTYPE_HELP)
    part = "part of the model that predicts; by default as configured"
    parser.add_argument("--predict-with", choices=PREDICT_WITH, metavar="PART", help=part)
    parser.add_argument("--num-threads", type=int, help="threads to use; all cores by default")


def _add_data_options(parser: Parser) -> None:
    parser.add_argument(
        "--text-column", nargs="+", metavar="COL", help="column of the texts, or several; found by default"
    )
    parser.add_argument("--label-column", help="column of the labels; found by default")
    parser.add_argument("--label-delimiter", help="what separates the labels in a string column; found by default")
    parser.add_argument("--encoding", help="encoding of a csv file; found by default")
    parser.add_argument("--separator", help="separator of the columns of a csv file; found by default")
    parser.add_argument("--sheet", help="sheet of an Excel file")
    parser.add_argument("--column-mapping", type=parse_mapping, help=_MAPPING)


def _add_editing_options(parser: Parser) -> None:
    parser.add_argument("--batch-size", type=int, default=_BATCH_SIZE, help="batch size of the encoder")
    parser.add_argument("--num-threads", type=int, help="threads to use; all cores by default")
    parser.add_argument("--overwrite", action="store_true", help="replace a model in the output folder")


def _add_evaluate(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id of the model")
    parser.add_argument("data", metavar="DATA", help="file, folder or Hub id of the data; `sample` is the bundled set")
    parser.add_argument("--split", help="split of the data; `test` by default, except of a single file")
    parser.add_argument(
        "--output",
        "-o",
        help="JSON file; by default SPLIT_results.json in the model's folder, which its card shows, or "
        "SPLIT_trial_results.json with --ks, --beam-size, --predict-with or --dtype",
    )
    parser.add_argument("--ks", type=int, nargs="+", help="lengths of the ranking to measure at")
    _add_data_options(parser)
    _add_model_options(parser)


def _add_ensemble(parser: Parser) -> None:
    parser.add_argument("models", metavar="MODEL", nargs="+", help="folders or Hub ids of the models, two or more")
    parser.add_argument("--output-dir", "--output", "-o", required=True, help="folder of the ensemble")
    parser.add_argument("--combine", choices=AVERAGES, help="what is averaged without --validation: scores, ranks")
    parser.add_argument("--weights", type=float, nargs="+", help="weight of each model; equal by default")
    parser.add_argument("--validation", metavar="DATA", help="documents on which a scorer is fitted")
    parser.add_argument("--split", help="split of DATA; `validation` by default, except of a single file")
    _add_data_options(parser)
    _add_editing_options(parser)


def _add_labels(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id of the model")
    parser.add_argument("--add", metavar="FILE", help="vocabulary of the new labels: a table, JSON or SKOS")
    parser.add_argument("--label-language", help="language of the names in a SKOS file")
    parser.add_argument("--examples", metavar="DATA", help="documents; those with new labels are examples of them")
    parser.add_argument("--split", help="split of DATA, if it has several")
    parser.add_argument("--remove", metavar="FILE", help="text file, or table with the column label")
    parser.add_argument("--rename", metavar="FILE", help="table with the columns label and new")
    parser.add_argument("--output-dir", "--output", "-o", required=True, help="folder of the new model")
    _add_data_options(parser)
    _add_editing_options(parser)


def _add_card(parser: Parser) -> None:
    parser.add_argument("model", metavar="FOLDER", help="folder of the model")
    parser.add_argument("--name", help="Hub id of the model; the name of the folder by default")
    parser.add_argument("--copy-to", metavar="FOLDER", help="also copy the card and its plots to this folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a card that was written by hand")
    _add_card_options(parser)


def _add_card_options(parser: Parser, is_dataset: bool = False) -> None:
    if not is_dataset:
        parser.add_argument("--dataset", help="name of the training data or its Hub id")
        parser.add_argument("--base-model", help="Hub id of the encoder, if it was loaded from a folder")
    parser.add_argument("--license", help="licence, such as cc-by-4.0")
    parser.add_argument("--language", nargs="+", help="language of the texts, such as en")
    parser.add_argument("--tags", nargs="+", default=[], help="additional tags")


def _add_export(parser: Parser) -> None:
    parser.add_argument("model", metavar="FOLDER", help="folder of the model")
    parser.add_argument("output", metavar="OUTPUT", help="folder of the copy")


def _add_verify(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or Hub id of the model")


def _add_destination(parser: Parser) -> None:
    parser.add_argument("repo", metavar="REPO", help="repository, such as me/my-tagger; created if it does not exist")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--revision", help="branch; created if it does not exist")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--message", help="commit message")
    parser.add_argument("--token", help="token; the one of `hf auth login` by default")


def _add_push(parser: Parser) -> None:
    parser.add_argument("model", metavar="FOLDER", help="folder of the model")
    _add_destination(parser)
    parser.add_argument("--no-code", action="store_true", help="omit the code; the model then requires hf_xmc")
    _add_card_options(parser)


def _add_push_dataset(parser: Parser) -> None:
    parser.add_argument("data", metavar="DATA", help="folder or file of the data; `sample` is the bundled dataset")
    _add_destination(parser)
    parser.add_argument("--column-mapping", type=parse_mapping, help=_MAPPING)
    parser.add_argument("--label-delimiter", help="separator of the labels in a string column")
    vocabulary = "vocabulary of the labels; without FILE that of the folder"
    parser.add_argument("--label-texts", nargs="?", const=True, metavar="FILE", help=vocabulary)
    _add_card_options(parser, is_dataset=True)


def _add_completion(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


# Of each command: what adds its arguments, its description and examples.
_PARSERS: dict[str, tuple[Callable[[Parser], None], str, tuple[str, ...]]] = {
    "predict": (
        _add_predict,
        """\
Predicts the labels of documents. The output has one line of JSON per document, {"labels": [{"label": ..., "score":
...}, ...]}, or is parquet with the columns labels and scores. Neither input nor output has to fit into memory.

INPUT is a file (parquet, jsonl, csv, xlsx, or .txt with a document per line; gzipped too), a pattern such as
'part-*.jsonl', a folder of such files, a dataset (its labels are ignored), or - for lines from standard input.

The job runs in parts. Run an interrupted command again to continue it; the result is the same to the byte. Changed
documents, model or options are an error. Several processes share the parts:
torchrun --nproc_per_node 2 -m hf_xmc predict MODEL INPUT ... --output OUT""",
        (
            "my-tagger new.csv --output tags.jsonl --keep-columns id",
            "my-tagger 'corpus/part-*.parquet' --output tags --format parquet --top-k 5 --threshold 0.2",
            "my-tagger new.csv --output tags.jsonl --labels @permitted.txt --exclude miscellaneous",
            "my-tagger - --output - < lines.txt",
        ),
    ),
    "evaluate": (
        _add_evaluate,
        "Prints the metrics of a model in percent and writes them, as fractions, to a JSON file.",
        ("my-tagger more.csv", "my-tagger sample --split test", "my-tagger sample --ks 1 10 --output trial.json"),
    ),
    "ensemble": (
        _add_ensemble,
        """\
Combines trained models with the same labels into one folder, which is evaluated and used like any other model. With
--validation, a scorer is fitted on documents that were not used for training.""",
        ("linear transformer --output-dir both --validation sample",),
    ),
    "labels": (
        _add_labels,
        """\
Saves a model with further, fewer or renamed labels, without training it again. Labels are removed first, then renamed,
then added. New labels are learnt from their texts and, with --examples, from the documents that have them.""",
        (
            "my-tagger --add new.csv --output-dir my-tagger-2",
            "my-tagger --add new.csv --examples tickets.csv --remove old.txt --output-dir my-tagger-2",
        ),
    ),
    "card": (
        _add_card,
        """\
Writes README.md, its plots and .eval_results into the folder of a model, from the records of its training and of its
evaluations (`hf-xmc evaluate`).""",
        ("my-tagger --language en --license cc-by-4.0",),
    ),
    "export": (
        _add_export,
        "Copies a model and the code that loads it. Without hf_xmc, the copy loads with trust_remote_code=True.",
        ("my-tagger my-tagger-with-code",),
    ),
    "verify": (
        _add_verify,
        """\
Checks a model of a folder or of the Hub: loads it, which checks all its arrays, and compares its files with the
checksums in the record of its training.""",
        ("my-tagger",),
    ),
    "push": (
        _add_push,
        """\
Uploads a model with its card (a card written by hand is kept) and the code that loads it. Pickles are not uploaded.
After an interruption, the same command continues the upload.""",
        ("my-tagger me/my-tagger --private",),
    ),
    "push-dataset": (
        _add_push_dataset,
        """\
Uploads a dataset in the columns of hf_xmc (text, labels): all splits, the labels with their texts and counts, and a
card.""",
        ("data/tickets me/tickets --license cc-by-4.0",),
    ),
    "completion": (
        _add_completion,
        "Prints a script that completes commands, options and their values in a shell.",
        (
            "bash > ~/.local/share/bash-completion/completions/hf-xmc",
            "zsh >> ~/.zshrc",
            "fish > ~/.config/fish/completions/hf-xmc.fish",
        ),
    ),
}
