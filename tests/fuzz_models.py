"""
Mutates model folders and data files at random. Whatever is in them, the library may refuse it, but not crash.

    python -m tests.fuzz_models --number 10000 --seed 0 --output result.json

Each mutation is loaded and used in a forked process with limits of time and memory. A mutated model must load and
predict, or be refused by an error that names a file. It must not crash, hang, use much more memory than the original,
give scores that are not numbers, or touch files outside of its folder.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path.insert(0, str(Path(__file__).parent))

from fuzz_mutations import mutations_of

TIME_LIMIT = 10.0
# Beyond what the process that is forked uses already. The undamaged models need about 60 MB more.
MEMORY_LIMIT = 1 << 30
TEXTS = ["topic07 word03 topic11", "", "word01 " * 50]


@dataclass
class Outcome:
    """What became of a mutation: `loaded`, `refused`, `unnamed`, `crash`, `hang`, `memory`, `nan` or `outside`."""

    kind: str
    detail: str = ""
    changed: bool = False
    seconds: float = 0.0
    memory: int = 0  # MB in addition to what the process used before


# ---- Running a mutation in a process of its own ----


def run_forked(action: Callable[[], Outcome], memory: int = MEMORY_LIMIT, seconds: float = TIME_LIMIT) -> Outcome:
    """Runs an action in a forked process, and says so if that crashes, hangs or needs too much memory."""
    read, write = os.pipe()
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.close(read)
        status = 1
        try:
            _limit(memory)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            outcome = action()
            outcome.memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
            os.write(write, json.dumps(vars(outcome)).encode()[:60000])
            status = 0
        except MemoryError:
            os.write(write, json.dumps(vars(Outcome("memory", "MemoryError"))).encode())
            status = 0
        except BaseException:
            os.write(write, json.dumps(vars(Outcome("crash", traceback.format_exc()[-2000:]))).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    status = _wait(child, start + seconds)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    elapsed = time.perf_counter() - start
    if status is None:
        return Outcome("hang", f"more than {seconds} s", seconds=elapsed)
    if os.WIFSIGNALED(status):
        return Outcome("crash", signal.Signals(os.WTERMSIG(status)).name, seconds=elapsed)
    outcome = Outcome(**json.loads(content)) if content else Outcome("crash", f"exit code {status}")
    outcome.seconds = elapsed
    return outcome


def _limit(memory: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def _wait(child: int, deadline: float) -> int | None:
    delay = 0.001
    while time.perf_counter() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(delay)
        delay = min(2 * delay, 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class _Watch:
    """Notes the files outside of a folder that Python opens while a model loads."""

    def __init__(self, folder: Path) -> None:
        self.root = str(folder.parent)  # the mutated folder is the only one in it
        self.folder = os.path.realpath(folder)
        self.touched: list[str] = []

    def __call__(self, event: str, args: tuple) -> None:
        if event != "open" or not isinstance(args[0], (str, bytes)):
            return
        path = os.path.realpath(os.fsdecode(args[0]))
        is_inside = path == self.folder or path.startswith(self.folder + os.sep)
        suspicious = path.startswith(self.root) or path.startswith("/etc/pass")
        if suspicious and not is_inside:
            self.touched.append(path)


def _names_a_file(message: str, folder: Path) -> bool:
    names = {path.name for path in folder.rglob("*")} | _FILES | {"has no file"}
    return any(name in message for name in names)


def _load(folder: Path) -> Any:
    """Loads a model by its class: `AutoModel` reads `config.json` before the checks, even if it is a link."""
    from hf_xmc import XMCEnsemble, XMCForTextClassification

    return (XMCEnsemble if folder.name == "ensemble" else XMCForTextClassification).from_pretrained(folder)


def use_model(folder: Path, expected: Any) -> Outcome:
    """Loads a model and predicts with all that it has."""
    watch = _Watch(folder)
    if expected is not None:  # hooks stay as long as their process
        sys.addaudithook(watch)
    try:
        model = _load(folder)
        results = [model.predict(TEXTS, top_k=5, num_threads=1)]
        members = getattr(model, "models", [model])
        for member in members:
            for part in member.available_parts:
                results.append(member.predict(TEXTS[:1], top_k=3, num_threads=1, predict_with=part))
    except (OSError, ValueError, TypeError, ImportError) as error:
        kind = "refused" if _names_a_file(str(error), folder) else "unnamed"
        if watch.touched:
            kind = "outside"
        return Outcome(kind, f"{type(error).__name__}: {error}"[:1500])
    if watch.touched:
        return Outcome("outside", str(watch.touched[:3]))
    scores = [score for result in results for row in result for _, score in row]
    if any(math.isnan(score) for score in scores):
        return Outcome("nan")
    return Outcome("loaded", changed=results[0] != expected)


def read_data(path: Path) -> int:
    """Reads a dataset; returns its number of rows."""
    from hf_xmc.data import load_xmc_dataset

    delimiter = ";" if path.name == "csv" else None
    cache = tempfile.mkdtemp(dir=path.parent.parent)
    try:
        loaded = load_xmc_dataset(str(path), label_delimiter=delimiter, cache_dir=cache)
        return sum(len(split[:]["labels"]) for split in loaded.values())
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def read_vocabulary(path: Path) -> dict[str, Any]:
    """Reads a label vocabulary."""
    import datasets

    from hf_xmc import load_vocabulary

    datasets.config.HF_DATASETS_CACHE = Path(tempfile.mkdtemp(dir=path.parent.parent))
    try:
        return dict(load_vocabulary(path))
    finally:
        shutil.rmtree(datasets.config.HF_DATASETS_CACHE, ignore_errors=True)


def use_vocabulary(path: Path, expected: Any) -> Outcome:
    """Reads a label vocabulary."""
    return use_data(path, expected, read_vocabulary)


def use_data(path: Path, expected: Any, read: Callable[[Path], Any] = read_data) -> Outcome:
    """Reads a dataset."""
    try:
        rows = read(path)
    except (OSError, ValueError, TypeError, ImportError) as error:
        kind = "refused" if _names_a_file(str(error), path) or str(path) in str(error) else "unnamed"
        return Outcome(kind, f"{type(error).__name__}: {error}"[:1500])
    return Outcome("loaded", changed=expected is not None and rows != expected)


# ---- What is mutated ----


def _make_models(folder: Path) -> None:
    """Trains a small model of each kind."""
    from conftest import encoder_arguments, make_documents, save_tiny_encoder, train_linear

    from hf_xmc import XMCEnsemble, XMCForTextClassification, XMCTrainer

    documents = make_documents(200)
    shape = {"tree_clustering": "kmeans", "tree_branching": 4, "tree_max_leaf_size": 4, "tree_max_depth": 3}
    train_linear(folder / "linear", documents, **shape)
    train_linear(folder / "knn", documents, method="knn")
    train_linear(
        folder / "characters", documents, method="parabel", tfidf_analyzer="char_wb", tfidf_ngram_range=[2, 3]
    )
    save_tiny_encoder(folder / "encoder")
    for method in ("xr-transformer", "lightxml", "aplc-xlnet"):
        args = encoder_arguments(folder / method, method=method, save_strategy="no", level_steps=[3])
        XMCTrainer(model=folder / "encoder", args=args, train_dataset=documents).train()
    XMCEnsemble.from_members([folder / "linear", folder / "xr-transformer"]).save_pretrained(folder / "ensemble")
    for name, kind in (("linear", "linear-sharded"), ("xr-transformer", "xr-transformer-sharded")):
        XMCForTextClassification.from_pretrained(folder / name).save_pretrained(folder / kind, max_shard_size=20_000)
    _add_neighbours(XMCForTextClassification.from_pretrained(folder / "xr-transformer")).save_pretrained(
        folder / "neighbours"
    )
    shutil.rmtree(folder / "encoder")


def _add_neighbours(model: Any) -> Any:
    """Adds both indices of similar documents to a model with an encoder."""
    import numpy as np
    from conftest import make_documents

    from hf_xmc.knn_ranker import KNNIndex, KNNRanker, KNNVectors
    from hf_xmc.scorer import default_scorer

    documents = make_documents(50, seed=3)
    features, labels = model.featurize(documents["text"]), model.labels.encode(documents)
    columns = features.sparse.tocsc()
    begin, ids = labels.indptr.astype(np.int64), labels.indices.astype(np.int32)
    index = KNNIndex(columns.indptr.astype(np.int64), columns.indices.astype(np.int32), columns.data, begin, ids)
    model.knn = KNNRanker(model.label_tree, index)
    model.knn_vectors = KNNVectors(features.dense.astype(np.float16), begin, ids, len(model.labels))
    model.scorer = default_scorer(model.available_parts)
    return model


def _make_data(folder: Path) -> None:
    """Writes a small dataset in each format that is read."""
    import numpy as np
    from conftest import make_documents
    from scipy.sparse import csr_matrix, save_npz

    documents = make_documents(30)
    names = sorted({name for labels in documents["labels"] for name in labels})
    for name in ("parquet", "jsonl", "csv", "xmc", "pecos", "pair"):
        (folder / name).mkdir(parents=True)
    documents.to_parquet(folder / "parquet" / "train.parquet")
    documents.to_json(folder / "jsonl" / "train.jsonl")
    joined = documents.map(lambda row: {"labels": ";".join(row["labels"])}, features=None)
    joined.to_csv(folder / "csv" / "train.csv")
    ids = [[names.index(name) for name in labels] for labels in documents["labels"]]
    lines = [",".join(map(str, row)) + " 0:0.5 3:1.25 7:2" for row in ids]
    (folder / "xmc" / "train.txt").write_text(f"{len(ids)} 10 {len(names)}\n" + "\n".join(lines) + "\n")
    ends = np.cumsum([0, *map(len, ids)])
    targets = csr_matrix((np.ones(ends[-1], np.float32), np.concatenate(ids), ends), shape=(len(ids), len(names)))
    save_npz(folder / "pecos" / "Y.trn.npz", targets, compressed=False)
    save_npz(folder / "pecos" / "X.trn.npz", targets * 2, compressed=False)
    (folder / "pecos" / "output-items.txt").write_text("\n".join(names) + "\n")
    (folder / "pair" / "train_texts.txt").write_text("\n".join(documents["text"]) + "\n")
    (folder / "pair" / "train_labels.txt").write_text("\n".join(" ".join(map(str, row)) for row in ids) + "\n")


def _make_vocabularies(folder: Path) -> None:
    """Writes a small label vocabulary in each text format that is read."""
    names = [f"name {i}" for i in range(30)]
    rows = [
        {"label": f"l{i}", "text": name, "synonyms": [f"{name} a", "b"], "parents": [f"l{i // 3}"] if i else []}
        for i, name in enumerate(names)
    ]
    prefixes = "@prefix s: <http://www.w3.org/2004/02/skos/core#> .\n@prefix t: <http://t.org/> .\n"
    turtle = [
        f't:{row["label"]} a s:Concept ; s:prefLabel "{row["text"]}"@en, "nimi {i}"@fi'
        + "".join(f" ; s:broader t:{parent}" for parent in row["parents"])
        for i, row in enumerate(rows)
    ]
    xml = [
        f'<s:Concept r:about="http://t.org/{row["label"]}"><s:prefLabel xml:lang="en">{row["text"]}</s:prefLabel>'
        + "".join(f'<s:broader r:resource="http://t.org/{parent}"/>' for parent in row["parents"])
        + "</s:Concept>"
        for row in rows
    ]
    spaces = 'xmlns:r="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:s="http://www.w3.org/2004/02/skos/core#"'
    lines = [f"{row['label']},{row['text']},{'; '.join(row['synonyms'])},{'|'.join(row['parents'])}" for row in rows]
    contents = {
        "vocabulary-csv": ("labels.csv", "\n".join(["label,text,synonyms,parents", *lines])),
        "vocabulary-jsonl": ("labels.jsonl", "\n".join(map(json.dumps, rows))),
        "vocabulary-annif": ("labels.tsv", "\n".join(f"<http://t.org/{row['label']}>\t{row['text']}" for row in rows)),
        "skos-turtle": ("labels.ttl", prefixes + " .\n".join(turtle) + " .\n"),
        "skos-xml": ("labels.rdf", f"<r:RDF {spaces}>\n" + "\n".join(xml) + "\n</r:RDF>\n"),
    }
    for kind, (name, text) in contents.items():
        (folder / kind).mkdir(parents=True)
        (folder / kind / name).write_text(text + "\n", encoding="utf-8")


# Files that a mutation may have removed.
_FILES = {
    "config.json", "member-1", "model.safetensors", "labels.json", "label_tree.safetensors", "ranker.safetensors",
    "tfidf.safetensors", "tfidf_vocab.txt", "tokenizer.json", "scorer.json", "knn.safetensors",
    "knn_vectors.safetensors", "label_vectors.safetensors",
}  # fmt: skip
# Files that say nothing about how a model is loaded.
_IGNORED = (".md", ".png", ".py")


def subjects(folder: Path) -> dict[str, tuple[Path, Callable[[Path, Any], Outcome]]]:
    """Makes models and datasets in a folder, and returns each with the function that uses it."""
    _make_models(folder / "models")
    _make_data(folder / "data")
    _make_vocabularies(folder / "vocabularies")
    found: dict[str, tuple[Path, Callable[[Path, Any], Outcome]]] = {}
    for use, kind in ((use_model, "models"), (use_data, "data"), (use_vocabulary, "vocabularies")):
        found.update({path.name: (path, use) for path in sorted((folder / kind).iterdir())})
    return found


# ---- Everything ----


def fuzz(
    number: int, seed: int, kinds: list[str] | None = None, report: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Runs mutations and returns how many had which outcome, by subject and by mutation, with examples."""
    import torch

    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        chosen = {name: item for name, item in subjects(root).items() if not kinds or name in kinds}
        expected = {name: _warm(path, use) for name, (path, use) in chosen.items()}
        gc.freeze()  # a collection in a child would copy the memory of its parent
        originals = {
            name: run_forked(lambda path=path, use=use, name=name: use(path, expected[name]))
            for name, (path, use) in chosen.items()
        }
        for name, outcome in originals.items():
            if outcome.kind != "loaded" or outcome.changed:
                raise AssertionError(f"the undamaged {name}: {outcome}")
        counts: dict[str, Counter] = {name: Counter() for name in chosen}
        examples: list[dict[str, Any]] = []
        slowest = 0.0
        start = time.perf_counter()
        for i in range(number):
            rng = random.Random(f"{seed}-{i}")
            name = sorted(chosen)[i % len(chosen)]
            outcome, what = _run_one(*chosen[name], root, expected[name], rng)
            if outcome.memory > 2 * originals[name].memory + 64 and outcome.kind in ("loaded", "refused", "unnamed"):
                outcome.kind = "memory"
            counts[name][outcome.kind] += 1
            counts[name]["changed"] += outcome.changed
            slowest = max(slowest, outcome.seconds)
            if outcome.kind not in ("loaded", "refused"):
                examples.append({"seed": seed, "number": i, "subject": name, "mutation": what, **vars(outcome)})
            if report is not None and (i + 1) % 500 == 0:
                report(_summary(i + 1, seed, counts, examples, slowest, start))
        return _summary(number, seed, counts, examples, slowest, start)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _warm(path: Path, use: Callable[[Path, Any], Outcome]) -> Any:
    """Compiles and imports what a subject needs; returns what it gives undamaged."""
    use(path, None)
    if use is use_model:
        return _load(path).predict(TEXTS, top_k=5, num_threads=1)
    return read_vocabulary(path) if use is use_vocabulary else read_data(path)


def _run_one(
    path: Path, use: Callable[[Path, Any], Outcome], root: Path, expected: Any, rng: random.Random
) -> tuple[Outcome, str]:
    folder = root / "mutated" / path.name
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(path, folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix not in _IGNORED)
    file = rng.choice(files)
    mutate = rng.choice(mutations_of(file))
    try:
        what = f"{file.relative_to(folder)}: {mutate.__name__} {mutate(file, rng)}"
    except (ValueError, KeyError, IndexError, OverflowError) as error:  # the mutation does not suit the file
        what = f"{file.relative_to(folder)}: {mutate.__name__} failed ({error})"
    return run_forked(lambda: use(folder, expected)), what


def _summary(
    number: int, seed: int, counts: dict[str, Counter], examples: list[dict[str, Any]], slowest: float, start: float
) -> dict[str, Any]:
    total: Counter = sum(counts.values(), Counter())
    return {
        "seed": seed,
        "mutations": number,
        "seconds": round(time.perf_counter() - start, 1),
        "slowest": round(slowest, 2),
        "total": dict(total),
        "subjects": {name: dict(count) for name, count in counts.items()},
        "examples": examples,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", help="only these models or formats")
    faulthandler.register(signal.SIGUSR1)  # where a run hangs
    parser.add_argument("--output", type=Path, help="JSON file of the results, written every 500 mutations")
    args = parser.parse_args()

    def report(summary: dict[str, Any]) -> None:
        if args.output:
            args.output.write_text(json.dumps(summary, indent=1))

    summary = fuzz(args.number, args.seed, args.kinds, report)
    report(summary)
    lines = [f"{name:24} {count}" for name, count in summary["subjects"].items()]
    lines.append(f"{summary['total']} {summary['seconds']} s, slowest {summary['slowest']} s")
    lines += [json.dumps(example)[:600] for example in summary["examples"][:20]]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if set(summary["total"]) - {"loaded", "refused", "unnamed", "changed"} else 0


if __name__ == "__main__":
    sys.exit(main())
