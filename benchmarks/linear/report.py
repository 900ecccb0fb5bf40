"""Tables of a run: accuracy, cost, and the ratio of each cost to that of a named system."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .prepare import read_json, write_json

METRICS = (
    ("P@1", "P@3", "P@5", "nDCG@3", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "PSnDCG@5")
    + ("R@10", "R@20", "RP@5", "micro-F1@5", "macro-F1@5", "tail-coverage@5")
)  # fmt: skip
Measurement = dict[str, Any]


def _train(key: str) -> Callable[[Measurement], Any]:
    return lambda measured: measured["train"].get(key)


def _predict(threads: str, key: str) -> Callable[[Measurement], Any]:
    def value(measured: Measurement) -> float | None:
        answer = measured["predict"].get(threads, {"status": None})
        return answer.get(key) if answer["status"] == 0 else None

    return value


def _cold_start(threads: str) -> Callable[[Measurement], Any]:
    def value(measured: Measurement) -> float | None:
        parts = [measured["predict"].get(threads, {}).get(key) for key in ("import_s", "load_s", "first_s")]
        return None if None in parts else sum(parts)

    return value


def _costs(threads: list[str]) -> dict[str, Callable[[Measurement], Any]]:
    """Columns of the table of costs and where their values are."""
    columns: dict[str, Callable[[Measurement], Any]] = {
        "train wall s": _train("wall_s"),
        "train CPU s": _train("cpu_s"),
        "train peak MB": _train("peak_rss_mb"),
        "model MB": lambda measured: measured.get("model_mb"),
    }
    if threads:
        columns["load s"] = _predict(threads[0], "load_s")
        columns["cold start s"] = _cold_start(threads[0])
        columns["predict peak MB"] = _predict(threads[0], "peak_rss_mb")
    for name, key in (("docs/s", "documents_per_s"), ("p50 ms", "p50_ms"), ("p95 ms", "p95_ms")):
        columns.update({f"{name}, {count} thr": _predict(count, key) for count in threads})
    return columns


def report(work: Path, *, runs: list[str] | None = None, against: str = "pecos-default") -> str:
    """Makes the tables of one or more runs and writes them as Markdown and JSON beside the run.

    Args:
        work (`Path`):
            Folder of the dataset.
        runs (`list[str]`, *optional*):
            Names of the runs; several are pooled. By default the newest.
        against (`str`, *optional*, defaults to `"pecos-default"`):
            System which the ratios divide by.

    Returns:
        `str`: the Markdown.
    """
    folder = work / "runs"
    names = runs or sorted(path.stem for path in folder.glob("*-*.json") if not path.stem.endswith(".summary"))[-1:]
    if not names:
        raise FileNotFoundError(f"{folder} holds no run: start one with `python -m benchmarks.linear run {work}`.")
    records = [read_json(folder / f"{name}.json") for name in names]
    summary = summarise(records, against)
    write_json(folder / f"{names[-1]}.summary.json", summary)
    text = format_report(records, summary)
    (folder / f"{names[-1]}.md").write_text(text, encoding="utf-8")
    return text


def summarise(records: list[dict[str, Any]], against: str) -> dict[str, Any]:
    """Medians over the repeats, and ratios of the measurements of the same repeat."""
    groups: dict[str, dict[tuple[int, int], Measurement]] = {}
    for i, record in enumerate(records):
        for measured in record["measurements"]:
            groups.setdefault(measured["system"], {})[i, measured["repeat"]] = measured
    good_groups = {name: {key: m for key, m in group.items() if "metrics" in m} for name, group in groups.items()}
    threads = sorted({key for group in groups.values() for m in group.values() for key in m["predict"]}, key=int)
    costs = _costs(threads)
    reference = good_groups.get(against, {})
    fallback = _medians(reference, costs)
    systems = {}
    for name, group in groups.items():
        good = good_groups[name]
        entry: dict[str, Any] = {"repeats": len(group), "failed": len(group) - len(good)}
        entry["metrics"] = _medians(good, {key: _metric(key) for key in _all_metrics(good)})
        entry["costs"] = _medians(good, costs)
        entry["others_cpu_s"] = _medians(good, {"train": _train("others_cpu_s")}).get("train")
        walls = [m["train"]["wall_s"] for m in good.values()]
        entry["train_wall_range_s"] = [min(walls), max(walls)] if walls else None
        entry["same_for_all_threads"] = all(m["same_for_all_threads"] for m in good.values())
        # Measurements of the same repeat met the same machine; a repeat the reference lacks is set against its median.
        entry["ratios"] = {}
        for column, value in costs.items():
            pairs = [(value(m), value(reference[key]) if key in reference else None) for key, m in good.items()]
            ratios = [
                mine / (theirs or fallback[column])
                for mine, theirs in pairs
                if mine and (theirs or fallback.get(column))
            ]
            if ratios:
                entry["ratios"][column] = statistics.median(ratios)
        systems[name] = entry
    return {"against": against, "commands": [record["command"] for record in records], "systems": systems}


def format_report(records: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    """Markdown of a summary."""
    record, systems = records[-1], summary["systems"]
    data, machine = record["data"], record["machine"]
    lines = [
        f"### {data['data']}" + ("" if data["train_file"] == "train" else f", {data['train_file']}"),
        "",
        f"{data['train_documents']:,} training and {data['test_documents']:,} test documents, "
        f"{data['labels']:,} labels, {data['features']:,} features ({data['vectors']}), "
        f"{data['nonzeros_per_document']:.0f} non-zeros and "
        f"{data['labels_per_document']:.2f} labels per document.",
        "",
        f"{record['date']}; {machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"Python {machine['python']}; revision {record['revision'] or 'not recorded'}; trained with "
        f"{record['train_threads']} threads. {_versions(record)}.",
        "",
        *(f"`{command}`" for command in summary["commands"]),
        "",
    ]
    shown = [key for key in METRICS if any(key in entry["metrics"] for entry in systems.values())]
    lines += _table(["system, %", *shown], [[n, *_cells(e["metrics"], shown, 100)] for n, e in systems.items()])
    columns = list(dict.fromkeys(column for entry in systems.values() for column in entry["costs"]))
    rows = [[name, *_cells(e["costs"], columns), _range(e), _number(e["others_cpu_s"])] for name, e in systems.items()]
    lines += _table(["system", *columns, "train wall range", "others' CPU s in training"], rows)
    lines += [
        f"Divided by {summary['against']}, repeat by repeat (docs/s: more is better; all others: less is better):",
        "",
    ]
    lines += _table(["system", *columns], [[n, *_cells(e["ratios"], columns)] for n, e in systems.items()])
    for name, entry in systems.items():
        if entry["failed"]:
            lines.append(f"{name}: {entry['failed']} of {entry['repeats']} repeats failed.")
        if not entry["same_for_all_threads"]:
            lines.append(f"{name}: predictions differ with the number of threads.")
    for name, done in record["setup"].items():
        outcome = "failed" if done["status"] else f"{done['wall_s']:.1f} s, not part of the training"
        lines.append(f"{name}: one-off setup {outcome}.")
    return "\n".join(lines).rstrip() + "\n"


def _all_metrics(group: dict[Any, Measurement]) -> list[str]:
    return list(dict.fromkeys(key for measured in group.values() for key in measured["metrics"]))


def _metric(key: str) -> Callable[[Measurement], Any]:
    return lambda measured: measured["metrics"].get(key)


def _medians(group: dict[Any, Measurement], columns: dict[str, Callable[[Measurement], Any]]) -> dict[str, float]:
    medians = {}
    for column, value in columns.items():
        values = [found for found in map(value, group.values()) if found is not None]
        if values:
            medians[column] = statistics.median(values)
    return medians


def _versions(record: dict[str, Any]) -> str:
    peers = ("libpecos", "omikuji", "napkinxc", "hf-xmc", "hf_xmc", "numba")
    pins = {pin for packages in record["versions"].values() for pin in packages if pin.partition("==")[0] in peers}
    return ", ".join(sorted(pin.replace("==", " ") for pin in pins))


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)] + [""]


def _cells(values: dict[str, float], columns: list[str], scale: int = 1) -> list[str]:
    return [f"{100 * values[c]:.2f}" if scale == 100 and c in values else _number(values.get(c)) for c in columns]


def _range(entry: dict[str, Any]) -> str:
    return " to ".join(map(_number, entry["train_wall_range_s"] or [None]))


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
