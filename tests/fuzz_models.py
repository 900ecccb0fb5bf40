"""
Mutates model folders and data files at random. Whatever is in them, the library may refuse it, but not crash.

    python -m tests.fuzz_models --number 10000 --seed 0 --processes 2 --output result.json

Each mutation is loaded and used in a forked process with limits of time and memory. A mutated model must load and
predict, or be refused by an error that names a file. It must not crash, hang, use much more memory than the original,
give scores that are not numbers, or touch files outside of its folder. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import struct
import subprocess
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

from fuzz_mutations import BAIT, mutations_of

TIME_LIMIT = 10.0
# Beyond what the process that is forked uses already. The undamaged models need about 60 MB more.
MEMORY_LIMIT = 1 << 30
# MB beyond twice the memory of the undamaged subject: arenas of allocators come in steps.
MEMORY_SLACK = 64
TEXTS = ["topic07 word03 topic11", "", "word01 " * 50]
KINDS = ("loaded", "refused", "unnamed", "outside", "nan", "memory", "hang", "crash")
# Large pages make a fork several times cheaper, and only malloc can use them.
ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass
class Outcome:
    """What became of a mutation, one of `KINDS`."""

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
    status = _wait(child, seconds)
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


def _wait(child: int, seconds: float) -> int | None:
    """Returns the status of a process, or ends it after so many seconds and returns `None`."""
    descriptor = os.pidfd_open(child)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ended = poll.poll(1000 * seconds)
    os.close(descriptor)
    if not ended:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return status if ended else None


class Watch:
    """
    Sees whether any process opens or writes files beside a folder, by whatever library (inotify).

    Args:
        folder (`Path`):
            The folder of which all files but those in `ignored` are watched.
        ignored (`str`):
            Name of the folder inside that may be used.
    """

    EVENTS = 0x20 | 0x100 | 0x2 | 0x200 | 0x40 | 0x80  # open, create, modify, delete, move from and to
    IS_FOLDER = 0x40000000

    def __init__(self, folder: Path, ignored: str) -> None:
        self.ignored = ignored
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK)
        for path in (folder, *(path for path in folder.iterdir() if path.is_dir() and path.name != ignored)):
            if libc.inotify_add_watch(self._descriptor, os.fsencode(path), self.EVENTS) < 0:
                raise OSError(ctypes.get_errno(), f"{path} cannot be watched")

    def close(self) -> None:
        """Stops watching."""
        os.close(self._descriptor)

    def touched(self) -> list[str]:
        """Names of the files that were touched since the last call."""
        found = []
        while True:
            try:
                content = os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                return found
            at = 0
            while at < len(content):
                _, mask, _, length = struct.unpack_from("iIII", content, at)
                name = content[at + 16 : at + 16 + length].rstrip(b"\0").decode()
                if name != self.ignored and not mask & self.IS_FOLDER:
                    found.append(name)
                at += 16 + length


def _names_a_file(message: str, folder: Path) -> bool:
    names = {path.name for path in folder.rglob("*")} | _FILES | {"has no file"}
    return any(name in message for name in names)


def _load(folder: Path) -> Any:
    """Loads a model by its class: `AutoModel` reads `config.json` before the checks, even if it is a link."""
    from hf_xmc import XMCEnsemble, XMCForTextClassification

    is_ensemble = folder.name.startswith("ensemble")
    return (XMCEnsemble if is_ensemble else XMCForTextClassification).from_pretrained(folder)


def use_model(folder: Path, expected: Any) -> Outcome:
    """Loads a model and predicts with all that it has."""
    from hf_xmc.loading import recorded_digests

    try:
        model = _load(folder)
        results = [model.predict(TEXTS, top_k=5, num_threads=1)]
        members = getattr(model, "models", [model])
        for member in members:
            for part in member.available_parts:
                results.append(member.predict(TEXTS[:1], top_k=3, num_threads=1, predict_with=part))
        results.append(model.predict(TEXTS[:1], num_threads=1, exclude=model.labels.names[:1]))
        if model.labels.hierarchy is not None:
            results.append(model.predict(TEXTS[:1], num_threads=1, level=1))
            under = model.labels.names[:2]
            results.append(model.predict(TEXTS[:1], num_threads=1, under=under, with_parents=True))
        model.labels.vocabulary()
        recorded_digests(folder)
    except (OSError, ValueError, TypeError, ImportError) as error:
        kind = "refused" if _names_a_file(str(error), folder) else "unnamed"
        return Outcome(kind, f"{type(error).__name__}: {error}"[:1500])
    scores = [score for result in results for row in result for _, score in row]
    if not all(math.isfinite(score) for score in scores):
        return Outcome("nan")
    return Outcome("loaded", changed=results[0] != expected)


def read_data(path: Path) -> int:
    """Reads a dataset; returns its number of rows."""
    from hf_xmc.data import load_xmc_dataset

    delimiter = ";" if path.name == "csv" else None
    with tempfile.TemporaryDirectory() as cache:
        loaded = load_xmc_dataset(str(path), label_delimiter=delimiter, cache_dir=cache)
        return sum(len(split[:]["labels"]) for split in loaded.values())


def read_vocabulary(path: Path) -> dict[str, Any]:
    """Reads a label vocabulary."""
    import datasets

    from hf_xmc import load_vocabulary

    with tempfile.TemporaryDirectory() as cache:
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        return dict(load_vocabulary(path))


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


# Files that a mutation may have removed.
_FILES = {
    "config.json", "member-1", "model.safetensors", "labels.json", "label_tree.safetensors", "ranker.safetensors",
    "tfidf.safetensors", "tfidf_vocab.txt", "tokenizer.json", "scorer.json", "knn.safetensors",
    "knn_vectors.safetensors", "label_vectors.safetensors",
}  # fmt: skip
# Files that say nothing about how a model is loaded.
_IGNORED = ("*.md", "*.png", "*.py", "training_args.json")

USES = {"models": use_model, "data": use_data, "vocabularies": use_vocabulary}


# ---- A share of the mutations ----


class Fuzzer:
    """
    Runs mutations of the subjects in a folder, see `fuzz_subjects.py`.

    Args:
        subjects (`Path`): Folder with the subjects.
        kinds (`list[str]`, *optional*): The names of some of them.
    """

    def __init__(self, subjects: Path, kinds: list[str] | None) -> None:
        self.paths = {
            path.name: (path, use)
            for kind, use in USES.items()
            for path in sorted((subjects / kind).iterdir())
            if not kinds or path.name in kinds
        }
        self.outer = Path(tempfile.mkdtemp(prefix="outer-", dir=subjects))
        # Files and a model beside the damaged folder that a hostile one could name.
        ignored = shutil.ignore_patterns(*_IGNORED)
        shutil.copytree(subjects / "models" / "linear", self.outer, ignore=ignored, dirs_exist_ok=True)
        shutil.copytree(subjects / "models" / "linear", self.outer / "model", ignore=ignored)
        shutil.copyfile(self.outer / "model" / "ranker.safetensors", self.outer / BAIT)
        tempfile.tempdir = str(subjects)
        self.expected = {name: self._warm(*item) for name, item in self.paths.items()}
        gc.freeze()  # a collection in a child would copy the memory of its parent
        self.originals = {name: self.run(name, None)[0] for name in self.paths}
        for name, outcome in self.originals.items():
            if outcome.kind != "loaded" or outcome.changed:
                raise AssertionError(f"the undamaged {name}: {outcome}")
        self._check_watch()

    def _warm(self, path: Path, use: Callable[[Path, Any], Outcome]) -> Any:
        """Compiles and imports what a subject needs; returns what it gives undamaged."""
        use(path, None)
        if use is use_model:
            return _load(path).predict(TEXTS, top_k=5, num_threads=1)
        return read_vocabulary(path) if use is use_vocabulary else read_data(path)

    def _check_watch(self) -> None:
        """Raises if a file beside the folder could be opened unnoticed."""
        watch = Watch(self.outer, "x")
        for path in (self.outer / BAIT, self.outer / "model" / "config.json"):
            run_forked(lambda path=path: Outcome(str(os.open(path, os.O_RDONLY))))
            if watch.touched() != [path.name]:
                raise AssertionError("the watch does not see files that are opened")
        watch.close()

    def run(self, name: str, rng: random.Random | None) -> tuple[Outcome, str]:
        """Damages a copy of a subject (without `rng`: does not) and uses it."""
        path, use = self.paths[name]
        folder = self.outer / name
        shutil.copytree(path, folder, ignore=shutil.ignore_patterns(*_IGNORED))
        what = "" if rng is None else damage(folder, rng, use is use_model)
        watch = Watch(self.outer, name)
        outcome = run_forked(lambda: use(folder, self.expected[name]))
        touched = watch.touched()
        watch.close()
        shutil.rmtree(folder)
        for left in self.outer.glob("outside-*"):
            left.unlink()
        if touched and outcome.kind not in ("crash", "hang"):
            outcome = Outcome("outside", str(touched[:3]))
        return outcome, what

    def run_share(self, number: int, seed: int, share: int, shares: int, report: Callable[[dict], None]) -> None:
        """Runs every `shares`th of the mutations and reports the results now and then."""
        names = sorted(self.paths)
        counts = {name: Counter(dict.fromkeys(KINDS, 0), changed=0) for name in names}
        examples: list[dict[str, Any]] = []
        slowest, start, done = 0.0, time.perf_counter(), 0
        for i in range(share, number, shares):
            name = names[i % len(names)]
            outcome, what = self.run(name, random.Random(f"{seed}-{i}"))
            limit = 2 * self.originals[name].memory + MEMORY_SLACK
            if outcome.memory > limit and outcome.kind in ("loaded", "refused", "unnamed"):
                outcome.kind = "memory"
            counts[name][outcome.kind] += 1
            counts[name]["changed"] += outcome.changed
            slowest, done = max(slowest, outcome.seconds), done + 1
            if outcome.kind not in ("loaded", "refused"):
                examples.append({"seed": seed, "number": i, "subject": name, "mutation": what, **vars(outcome)})
            if done % 100 == 0 or i + shares >= number:
                seconds = time.perf_counter() - start
                summary = {"mutations": done, "seconds": round(seconds, 1), "slowest": round(slowest, 2)}
                report({**summary, "subjects": counts, "examples": examples})


def damage(folder: Path, rng: random.Random, is_model: bool) -> str:
    """Changes a file of a folder at random; returns what was done."""
    file = rng.choice(sorted(file for file in folder.rglob("*") if file.is_file()))
    mutate = rng.choice(mutations_of(file, is_model))
    try:
        return f"{file.relative_to(folder)}: {mutate.__name__} {mutate(file, rng)}"
    except (ValueError, KeyError, IndexError, OverflowError) as error:  # the mutation does not suit the file
        return f"{file.relative_to(folder)}: {mutate.__name__} failed ({error})"


# ---- Everything ----


def merge(parts: list[dict[str, Any]], seed: Any) -> dict[str, Any]:
    """The results of all shares, or of several runs, as one."""
    subjects: dict[str, Counter] = {}
    for part in parts:
        for name, counts in part["subjects"].items():
            subjects[name] = subjects.get(name, Counter()) + Counter(counts)
    return {
        "seed": seed,
        "mutations": sum(part["mutations"] for part in parts),
        "seconds": max((part["seconds"] for part in parts), default=0),
        "slowest": max((part["slowest"] for part in parts), default=0),
        "total": dict(sum(subjects.values(), Counter())),
        "subjects": {name: dict(subjects[name]) for name in sorted(subjects)},
        "examples": [example for part in parts for example in part["examples"]],
    }


def as_table(summary: dict[str, Any]) -> str:
    """The results as a table in Markdown, models first, with what the limits are about."""
    rows = [f"| subject | mutations | {' | '.join(KINDS)} | other predictions |", "| --- |" + " ---: |" * 10]
    groups: dict[str, Counter] = {"models": Counter(), "data": Counter()}
    data = ("csv", "jsonl", "pair", "parquet", "pecos", "xmc", "skos", "vocabulary")
    for name, counts in sorted(summary["subjects"].items(), key=lambda item: (item[0].startswith(data), item[0])):
        group = groups["data" if name.startswith(data) else "models"]
        group.update(counts)
        rows.append(_row(name, counts))
    rows += [_row(f"**{name}**", counts) for name, counts in (*groups.items(), ("all", summary["total"]))]
    refused, unnamed = (summary["total"].get(kind, 0) for kind in ("refused", "unnamed"))
    share = refused / max(refused + unnamed, 1)
    return "\n".join(
        [*rows, "", f"{share:.2%} of the refusals name the file. The slowest mutation took {summary['slowest']} s."]
    )


def _row(name: str, counts: dict[str, int]) -> str:
    cells = [sum(counts.get(kind, 0) for kind in KINDS), *(counts.get(kind, 0) for kind in (*KINDS, "changed"))]
    return f"| {name} | {' | '.join(map(str, cells))} |"


def fuzz(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Makes the subjects, and runs the mutations in several processes; returns the merged results."""
    here = Path(__file__).parent
    search = os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH")]))
    make = [sys.executable, str(here / "fuzz_subjects.py"), str(root)]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": search})
    arguments = ["--number", str(args.number), "--seed", str(args.seed), "--kinds", *(args.kinds or [])]
    command = [sys.executable, "-m", "tests.fuzz_models", *arguments, "--folder", str(root)]
    command += ["--processes", str(args.processes)]
    workers = [
        subprocess.Popen([*command, "--share", str(share)], cwd=here.parent, env={**os.environ, **ENVIRONMENT})
        for share in range(args.processes)
    ]

    def merged() -> dict[str, Any]:
        parts = [json.loads(path.read_text()) for path in sorted(root.glob("result-*.json"))]
        summary = merge(parts, args.seed)
        if args.output:
            args.output.write_text(json.dumps(summary, indent=1))
        return summary

    try:
        while any(worker.poll() is None for worker in workers):
            time.sleep(1)
            merged()
        if any(worker.returncode for worker in workers):
            raise RuntimeError("a process of the fuzzer failed")
        return merged()
    finally:
        for worker in workers:
            worker.kill()


def run_worker(args: argparse.Namespace) -> None:
    """Runs a share of the mutations; writes the results to a file."""
    import torch

    faulthandler.register(signal.SIGUSR1)  # where a run hangs
    torch.set_num_threads(1)
    path = args.folder / f"result-{args.share}.json"

    def report(summary: dict[str, Any]) -> None:
        path.with_suffix(".new").write_text(json.dumps(summary))
        os.replace(path.with_suffix(".new"), path)

    Fuzzer(args.folder, args.kinds).run_share(args.number, args.seed, args.share, args.processes, report)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", help="only these models or formats")
    parser.add_argument("--processes", type=int, default=1, help="the outcomes do not depend on it")
    parser.add_argument("--output", type=Path, help="JSON file of the results, written while it runs")
    parser.add_argument("--table", type=Path, nargs="+", help="print a table of the results of earlier runs instead")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share is not None:
        run_worker(args)
        return 0
    if args.table:
        parts = [json.loads(path.read_text()) for path in args.table]
        sys.stdout.write(as_table(merge(parts, [part["seed"] for part in parts])) + "\n")
        return 0
    root = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        summary = fuzz(args, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    lines = [f"{name:24} {count}" for name, count in summary["subjects"].items()]
    lines.append(f"{summary['total']} {summary['seconds']} s, slowest {summary['slowest']} s")
    lines += [json.dumps(example)[:600] for example in summary["examples"][:20]]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if set(summary["total"]) - {"loaded", "refused", "unnamed", "changed"} else 0


if __name__ == "__main__":
    sys.exit(main())
