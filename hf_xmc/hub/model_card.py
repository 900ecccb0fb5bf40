"""Model cards: the text, its pictures and the results in machine-readable form."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, eval_result_entries_to_yaml

from ..configuration_xmc import TASK
from ..evaluation.report import format_by_frequency, format_metrics, plot_by_frequency
from ..serialization import ENSEMBLE_FILE, RECORD_FILE, TRAINING_ARGS_FILE, atomic_write
from ..training.record import result_files
from .card_data import CardFacts, CardOptions, card_data, eval_entries, evaluation_name, reported
from .training_plot import plot_training

CARD_FILE = "README.md"
EVAL_RESULTS_FILE = ".eval_results/hf_xmc.yaml"
TEMPLATE = Path(__file__).with_name("model_card_template.md")
# A card with this line may be written anew; one without it is the user's.
MARK = "<!-- This card was written by hf_xmc. It may be written anew as long as this line is in it. -->"

_FREQUENCY_PLOT, _TRAINING_PLOT = "label_frequency.png", "training.png"

logger = logging.getLogger(__name__)


def write_model_card(
    folder: str | os.PathLike, given: CardOptions | None = None, *, overwrite: bool = False
) -> Path | None:
    """
    Writes the card of a model into its folder, with pictures (if matplotlib is installed) and `.eval_results`.

    Args:
        folder (`str` or `os.PathLike`):
            Folder of a saved model. What its training and evaluations left there is in the card.
        given ([`CardOptions`], *optional*):
            What no file knows: licence, language, names.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether to replace a card that was written or edited by hand.

    Returns:
        `Path` or `None`: the card; `None` if there is one written by hand, which stays.
    """
    path = Path(folder, CARD_FILE)
    if path.is_file() and not overwrite and MARK not in path.read_text(encoding="utf-8"):
        logger.warning("`%s` was written by hand and stays as it is.", path)
        return None
    facts = CardFacts.read(folder, given)
    if facts.record.evaluations or facts.record.seconds is not None:
        facts.record.save(folder)  # with the results of the files beside it, which are not published
    plots = _write_plots(facts)
    entries = eval_entries(facts)
    if entries:
        content = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
        with atomic_write(Path(folder, EVAL_RESULTS_FILE)) as temporary:
            Path(temporary).write_text(content, encoding="utf-8")
    with atomic_write(path) as temporary:
        Path(temporary).write_text(render_model_card(facts, plots), encoding="utf-8")
    return path


def forget_model(folder: str | os.PathLike) -> None:
    """
    Removes what is on record of a folder's model: options, record, results, pictures and the card, if it wrote that.

    Args:
        folder (`str` or `os.PathLike`):
            Folder into which another model is about to be saved, whose card must not show these.
    """
    try:
        _remove_records(Path(folder))
    except (OSError, ValueError) as error:  # the new model must not be lost for a file that cannot be read
        logger.warning("Not all that the model before left is gone: %s", error)


def _remove_records(folder: Path) -> None:
    records = (TRAINING_ARGS_FILE, RECORD_FILE, ENSEMBLE_FILE)
    for name in (*records, EVAL_RESULTS_FILE, _FREQUENCY_PLOT, _TRAINING_PLOT):
        (folder / name).unlink(missing_ok=True)
    for path, _ in result_files(folder):
        path.unlink()
    card = folder / CARD_FILE
    if card.is_file() and MARK in card.read_text(encoding="utf-8"):
        card.unlink()


def render_model_card(facts: CardFacts, plots: dict[str, str] | None = None) -> str:
    """
    The card as text.

    Args:
        facts ([`CardFacts`]):
            What it says.
        plots (`dict[str, str]`, *optional*):
            Files of the pictures `frequency` and `training`.
    """
    evaluations = [_evaluation_tables(facts, evaluation) for evaluation in facts.record.evaluations]
    card = ModelCard.from_template(
        card_data(facts),
        template_path=str(TEMPLATE),
        facts=facts,
        record=facts.record,
        mark=MARK,
        task=TASK,
        title=facts.model_name.split("/")[-1],
        example=facts.record.examples[0] if facts.record.examples else "Prospects for renewable energy in Jordan",
        evaluations=evaluations,
        plots=plots or {},
    )
    return f"{card.content.rstrip()}\n"


def _evaluation_tables(facts: CardFacts, evaluation: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "name": evaluation_name(facts, evaluation),
        "split": evaluation["split"],
        "documents": evaluation["documents"],
        "speed": evaluation["documents"] / evaluation["seconds"] if evaluation.get("seconds") else None,
        "metrics": format_metrics(reported(evaluation["metrics"]) or evaluation["metrics"], markdown=True),
    }
    k = _bucket_k(evaluation)
    if k is not None:
        tables["by_frequency"] = format_by_frequency(evaluation["by_frequency"], k=k, markdown=True)
    return tables


def _bucket_k(evaluation: dict[str, Any]) -> int | None:
    """The k at which results by frequency are shown: 5 if it was measured."""
    rows = evaluation.get("by_frequency") or []
    ks = [int(name.partition("@")[2]) for name in (rows[0] if rows else ()) if name.startswith("recall@")]
    return 5 if 5 in ks else max(ks, default=None)


def _write_plots(facts: CardFacts) -> dict[str, str]:
    """Writes what pictures can be made; without matplotlib a card has none."""
    plots: dict[str, str] = {}
    shown = [evaluation for evaluation in facts.record.evaluations if _bucket_k(evaluation) is not None]
    try:
        if shown:
            # Choices were made on the other splits.
            pictured = next((evaluation for evaluation in shown if evaluation["split"] == "test"), shown[-1])
            k = _bucket_k(pictured)
            assert k is not None
            title = f"{evaluation_name(facts, pictured)}, {pictured['split']}"
            plot_by_frequency(pictured["by_frequency"], facts.folder / _FREQUENCY_PLOT, k=k, title=title)
            plots["frequency"] = _FREQUENCY_PLOT
        if facts.record.stages:
            plot_training(facts.record, facts.folder / _TRAINING_PLOT)
            plots["training"] = _TRAINING_PLOT
    except ImportError:
        logger.info("The card has no pictures: matplotlib is not installed.")
    return plots
