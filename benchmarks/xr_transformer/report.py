"""Tables of a comparison: those of the linear benchmark, the parts of the training, and how the figures came about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.linear.prepare import read_json
from benchmarks.linear.report import report as report_costs

REFERENCE = "pecos-published"


def report(work: Path, run: str) -> str:
    """Makes the tables of a run and writes them as Markdown beside it.

    Args:
        work (`Path`):
            Folder of the comparison.
        run (`str`):
            Name of the run.

    Returns:
        `str`: the Markdown.
    """
    folder = work / "runs"
    record = read_json(folder / f"{run}.json")
    systems = {measured["system"]: measured for measured in record["measurements"]}
    reference = REFERENCE if REFERENCE in systems else next(iter(systems))
    lines = [report_costs(work, runs=[run], against=reference), *_parts(systems), *_notes(record, systems)]
    text = "\n".join(lines).rstrip() + "\n"
    (folder / f"{run}.md").write_text(text, encoding="utf-8")
    return text


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown, its first column to the left."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def _parts(systems: dict[str, dict[str, Any]]) -> list[str]:
    """What the test set took, and the parts of the training as the systems themselves time them."""
    rows = []
    for name, measured in systems.items():
        (whole,) = (answer for answer in measured["predict"].values() if "batch_s" in answer)
        parts = ", ".join(f"{part}: {seconds:,.1f}" for part, seconds in measured["train"]["parts_s"].items())
        rows.append([name, *(f"{whole[key]:,.1f}" for key in ("batch_s", "peak_rss_mb", "others_cpu_s")), parts])
    head = ["system", "test set s", "test set peak MB", "others' CPU s in it", "parts of the training, s"]
    return [*table(head, rows), ""]


def _notes(record: dict[str, Any], systems: dict[str, dict[str, Any]]) -> list[str]:
    options, data = record["options"], record["data"]
    versions = "; ".join(f"{venv} with {_versions(packages)}" for venv, packages in record["versions"].items())
    lines = [
        f"Encoder {options['encoder']}, {options['steps']} steps of {options['batch_size']} documents, "
        f"{options['max_length']} tokens; {versions}."
    ]
    if "pecos-default" in systems:
        fit_s = data["tfidf_fit_s"] + data["tfidf_trn_s"]
        lines += [
            "",
            "PECOS gets its TF-IDF vectors ready-made; its times are without them, those of hf-xmc with them. Making "
            f"them took {fit_s:.1f} s for the training documents, {data['tfidf_tst_s']:.1f} s for the test documents "
            f"and {data['tfidf_p50_ms']:.2f} ms for one.",
        ]
    if REFERENCE in systems:
        train = systems[REFERENCE]["train"]
        lines += [
            "",
            f"{REFERENCE} is put together: the training of pecos-default from start to end without its second tree "
            f"and ranker ({train['without_ranker_s']:,.1f} s) and, in a process of its own, the published ranker on "
            f"the same features ({train['ranker']['wall_s']:,.1f} s). The last encoding of the training documents "
            "belongs to the former, so nothing is encoded twice. The peak is the larger one of the two.",
        ]
    return lines


def _versions(packages: list[str]) -> str:
    pins = dict(package.split("==", 1) for package in packages if "==" in package)
    return ", ".join(f"{name} {pins[name]}" for name in ("torch", "transformers") if name in pins)
