"""
Breaks the code on purpose, one line at a time, and checks that the tests fail: `python scripts/mutants.py`.

`mutants.yaml` lists the mutants: a snippet of a file, its wrong version, and the tests that must fail with it. A
mutant that survives shows behaviour that no test checks. Names after the command choose mutants; all run by default.

Only a copy of the repository is changed. Results are appended to a file of JSON lines, and a restarted run skips the
mutants in it whose code has not changed. The exit code is 1 if a mutant survived, 2 if tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_IGNORED = (".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", "models", "site")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)
_NOTHING_COLLECTED = (4, 5)  # exit codes of pytest


@dataclass(frozen=True)
class Mutant:
    """A snippet of `file` that occurs once, its wrong version, and tests that must fail, the most specific first."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, tree: Path) -> str:
        """Returns the content of the file with the mistake."""
        text = (tree / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: `{self.old}` occurs {text.count(self.old)} times in `{self.file}`.")
        return text.replace(self.old, self.new)

    def key(self, tree: Path) -> str:
        """Returns a digest that changes with the mutant, its file and its tests."""
        return hashlib.blake2b("\0".join((self.apply(tree), *self.tests)).encode(), digest_size=8).hexdigest()


def load_mutants(path: Path) -> list[Mutant]:
    """Reads the list of mutants."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        Mutant(
            entry["name"],
            f"hf_xmc/{entry['file']}",
            entry["old"].strip("\n"),
            entry["new"].strip("\n"),
            tuple(f"tests/test_{test}" for test in entry["tests"]),
        )
        for entry in entries
    ]


class Copy:
    """
    A copy of the repository in which tests run.

    Args:
        tree (`Path`): The repository.
        folder (`Path`): Folder of the copy and of caches.
        timeout (`float`): Seconds after which a run of tests is ended.
    """

    def __init__(self, tree: Path, folder: Path, timeout: float) -> None:
        self.tree, self.folder, self.timeout = tree, folder, timeout
        self.copy = folder / "tree"
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(tree, self.copy, ignore=shutil.ignore_patterns(*_IGNORED))
        command = [sys.executable, "-c", "import hf_xmc; print(hf_xmc.__file__)"]
        found = subprocess.run(command, cwd=self.copy, env=self._environment(), capture_output=True, text=True)
        if not found.stdout.startswith(str(self.copy)):
            raise RuntimeError(f"Tests would not import the copy in `{self.copy}`: {found.stdout}{found.stderr}")

    def _environment(self, kernels: Path | None = None) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(self.copy),
            # Bytecode is compared by seconds, and a mutant may come and go within one.
            "PYTHONDONTWRITEBYTECODE": "1",
            "NUMBA_CACHE_DIR": str(kernels or self.folder / "kernels"),
            "HF_HOME": str(self.folder / "cache"),
        }

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[Path | None]:
        """Applies a mutant for a block of code. Yields a folder for kernels if they must be compiled again."""
        path = self.copy / mutant.file
        path.write_text(mutant.apply(self.tree), encoding="utf-8")
        holds_kernels = re.search(r"^@compiled$|^import numba$", path.read_text(encoding="utf-8"), re.M)
        kernels = self._copy_kernels(path.stem) if holds_kernels else None
        try:
            yield kernels
        finally:
            shutil.copy2(self.tree / mutant.file, path)
            if kernels is not None:
                shutil.rmtree(kernels, ignore_errors=True)

    def _copy_kernels(self, module: str) -> Path:
        """
        Copies the compiled kernels but those of a module and of all that import it.

        A kernel includes those it calls, but only a change of its own file makes its compiled version out of date.
        """
        sources = {path.stem: path.read_text(encoding="utf-8") for path in (self.copy / "hf_xmc").rglob("*.py")}
        stale, found = {module}, {module}
        while found:
            imports = re.compile(rf"^(?:from|import) .*\b(?:{'|'.join(found)})\b", re.M)
            found = {name for name, text in sources.items() if name not in stale and imports.search(text)}
            stale |= found
        kernels = Path(tempfile.mkdtemp(prefix="kernels-", dir=self.folder))
        for path in (self.folder / "kernels").glob("*/*"):
            if path.name.partition(".")[0] not in stale:
                (kernels / path.parent.name).mkdir(exist_ok=True)
                os.link(path, kernels / path.parent.name / path.name)
        return kernels

    def first_failure(self, tests: Sequence[str], kernels: Path | None = None) -> str | None:
        """Runs tests until one fails. Returns the name of that test, `"timeout"`, or `None` if all pass."""
        for test in tests:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n0", test]
            with subprocess.Popen(
                command,
                cwd=self.copy,
                env=self._environment(kernels),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            ) as process:
                try:
                    output, _ = process.communicate(timeout=self.timeout)
                except BaseException as error:
                    os.killpg(process.pid, signal.SIGKILL)  # with the processes that tests have started
                    if isinstance(error, subprocess.TimeoutExpired):
                        return "timeout"
                    raise
            if process.returncode in _NOTHING_COLLECTED:
                raise RuntimeError(f"`{test}` has no tests to run:\n{output[-2000:]}")
            if process.returncode:
                found = _FAILED.search(output)
                return found[1] if found else f"{test} ended with {process.returncode}"
        return None


class Results:
    """A file of JSON lines with the result of every mutant."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        self.known: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in map(json.loads, lines)}

    def find(self, name: str, key: str) -> dict[str, Any] | None:
        """Returns the result of a name, if it belongs to the same code."""
        entry = self.known.get(name)
        return entry if entry is not None and entry["key"] == key else None

    def add(self, **entry: Any) -> dict[str, Any]:
        """Appends an entry."""
        self.known[entry["name"]] = entry
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        return entry


def check_tests(copy: Copy, mutants: Sequence[Mutant], results: Results) -> list[str]:
    """Returns the tests that fail without a mutant."""
    failing = []
    # A file stands for the tests in it.
    files = {test for mutant in mutants for test in mutant.tests if "::" not in test}
    tests = {test for mutant in mutants for test in mutant.tests if test.partition("::")[0] not in files}
    for test in [*sorted(files), *sorted(tests)]:
        key = hashlib.blake2b((copy.tree / test.partition("::")[0]).read_bytes(), digest_size=8).hexdigest()
        entry = results.find(test, key)
        if entry is None:
            start = time.monotonic()
            failure = copy.first_failure([test])
            entry = results.add(name=test, key=key, failure=failure, seconds=round(time.monotonic() - start, 1))
            print(f"without a mutant: {test} {failure or 'passes'}, {entry['seconds']} s", flush=True)
        if entry["failure"] is not None:
            failing.append(entry["failure"])
    return failing


def try_mutant(copy: Copy, mutant: Mutant, key: str, results: Results) -> dict[str, Any]:
    """Runs the tests of a mutant."""
    start = time.monotonic()
    with copy.broken(mutant) as kernels:
        failure = copy.first_failure(mutant.tests, kernels)
    outcome = "survived" if failure is None else "killed"
    seconds = round(time.monotonic() - start, 1)
    print(f"{outcome}: {mutant.name} ({failure}), {seconds} s", flush=True)
    return results.add(name=mutant.name, key=key, outcome=outcome, failure=failure, seconds=seconds)


def main() -> int:
    """Tries mutants; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutants to try; all by default")
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1], help="the repository")
    folder = Path(tempfile.gettempdir(), "hf-xmc-mutants")
    parser.add_argument("--folder", type=Path, default=folder, help="folder of the copy and of caches")
    parser.add_argument("--results", type=Path, default=Path("mutants.jsonl"), help="file of results, appended to")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a run of tests")
    parser.add_argument("--skip-check", action="store_true", help="do not run the tests without a mutant first")
    parser.add_argument("--again", action="store_true", help="try mutants again that survived")
    parser.add_argument("--list", action="store_true", help="list the mutants and check that their snippets exist")
    arguments = parser.parse_args()
    known = {mutant.name: mutant for mutant in load_mutants(Path(__file__).with_suffix(".yaml"))}
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"{', '.join(map(repr, unknown))}: not a mutant, see `--list`")
    tree = arguments.tree.resolve()
    mutants = [known[name] for name in arguments.names] or list(known.values())
    keys = [mutant.key(tree) for mutant in mutants]
    if arguments.list:
        print("\n".join(mutant.name for mutant in mutants))
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    copy, results = Copy(tree, arguments.folder.resolve(), arguments.timeout), Results(arguments.results)
    failing = [] if arguments.skip_check else check_tests(copy, mutants, results)
    if failing:
        print(f"These tests fail without a mutant: {', '.join(failing)}", file=sys.stderr)
        return 2
    entries = []
    for mutant, key in zip(mutants, keys, strict=True):
        entry = results.find(mutant.name, key)
        if entry is None or (arguments.again and entry["outcome"] == "survived"):
            entry = try_mutant(copy, mutant, key, results)
        entries.append(entry)
    survivors = [entry["name"] for entry in entries if entry["outcome"] == "survived"]
    print(f"\n{len(entries) - len(survivors)} killed, {len(survivors)} survived: {', '.join(survivors) or 'none'}")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
