"""Predicting large corpora: many files, several processes, and an interrupted job that is taken up again."""

from __future__ import annotations

import filecmp
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, Features

from ..data.corpus import VECTOR_COLUMNS, Batch, Corpus, DocumentSource, WantedColumns, common_types, find_sources
from ..ensemble_xmc import XMCEnsemble
from ..modeling_utils import PredictMixin, XMCOutput
from ..remote_code import member_folders
from ..serialization import ENSEMBLE_FILE, RECORD_FILE, RESULTS_SUFFIX, TRAINING_ARGS_FILE
from ..utils import Progress, available_cores, count_threads
from ..version import __version__
from .predict import predict_batches, reads_text
from .writers import (
    FORMATS,
    PREDICTED,
    PartsFolder,
    Predictions,
    join_files,
    parquet_schema,
    prediction_writer,
)

# Processes wait for the slowest at the end, and a launcher ends them if one has died.
_TIMEOUT = timedelta(days=7)
_MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model")
_RECORDS = (RECORD_FILE, TRAINING_ARGS_FILE, ENSEMBLE_FILE)


@dataclass(frozen=True)
class PredictionArguments:
    """
    What predictions depend on, beside model and documents.

    Args:
        top_k (`int`, *optional*):
            Labels per document; that of the model by default.
        threshold (`float`, *optional*, defaults to 0.0):
            Labels with a smaller score are left out.
        beam_size (`int`, *optional*):
            Nodes kept per level; that of the model by default. 0 keeps all.
        predict_with (`str`, *optional*):
            `"ranker"`, `"heads"` or `"both"`; that of the model by default.
        text_column (`str`, *optional*, defaults to `"text"`):
            Column of the texts.
        keep_columns (`Sequence[str]`, *optional*):
            Columns of the input that are written beside the predictions, such as an id.
        batch_size (`int`, *optional*, defaults to 1024):
            Documents that are worked on together.
        part_size (`int`, *optional*, defaults to 16384):
            Documents of a part: what each process loses at most when it is killed.
    """

    top_k: int | None = None
    threshold: float = 0.0
    beam_size: int | None = None
    predict_with: str | None = None
    text_column: str = "text"
    keep_columns: Sequence[str] = ()
    batch_size: int = 1024
    part_size: int = 16_384

    def __post_init__(self) -> None:
        for name in ("top_k", "batch_size", "part_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, not {value}.")
        if self.beam_size is not None and self.beam_size < 0:
            raise ValueError(f"`beam_size` must not be negative, but is {self.beam_size}; 0 keeps every node.")
        if not math.isfinite(self.threshold):
            raise ValueError(f"`threshold` must be a number, not {self.threshold}.")
        taken = next((name for name in self.keep_columns if name in PREDICTED), None)
        if taken is not None:
            raise ValueError(f"`keep_columns` names `{taken}`, but so the predictions are called. Rename that column.")


@dataclass(frozen=True)
class PredictionJob:
    """
    What [`predict_corpus`] has done.

    Args:
        files (`list[Path]`): Files of the predictions, in the order of the documents.
        documents (`int`): Documents in them.
        parts (`int`): Parts of the job.
        found (`int`): Parts that an earlier run had finished.
    """

    files: list[Path]
    documents: int
    parts: int
    found: int


def process_state() -> PartialState:
    """The processes of `torchrun` or `accelerate launch`; they are started on CPUs as well, where there is no GPU."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return PartialState(cpu=on_cpu or not torch.accelerator.is_available(), timeout=_TIMEOUT)


def predict_corpus(
    model: PredictMixin,
    inputs: Sequence[str | os.PathLike | Dataset],
    output: str | os.PathLike,
    arguments: PredictionArguments | None = None,
    *,
    split: str | None = None,
    format: str | None = None,
    overwrite: bool = False,
    num_threads: int | None = None,
    report: Progress | None = None,
) -> PredictionJob:
    """
    Tags the documents of many files, part by part. Call it again after it was killed and it goes on; the result is the
    same to the byte. Under `torchrun` or `accelerate launch` the processes share the parts.

    Args:
        model ([`XMCForTextClassification`] or [`XMCEnsemble`]):
            A model as `from_pretrained` loads it.
        inputs (`Sequence`):
            Files, patterns, folders, Hub ids or datasets, see [`find_sources`].
        output (`str` or `os.PathLike`):
            A folder, which gets a file for each part; or a file, into which parts are joined at the end (until then
            they are in a folder beside it, `OUTPUT.parts`). A name without ending is one of a folder.
        arguments ([`PredictionArguments`], *optional*):
            What the predictions depend on.
        split (`str`, *optional*):
            Split of folders and datasets, where they have several.
        format (`str`, *optional*):
            `"jsonl"` or `"parquet"`; by default what the name of the file says, JSON lines in a folder.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether predictions that are there, of other documents, another model or other arguments, are replaced.
            A job that was interrupted is continued in either case.
        num_threads (`int`, *optional*):
            Threads to use; all cores, shared by the processes of a machine, by default.
        report (`Callable`, *optional*):
            Called with (stage, done, total): documents of this process.
    """
    arguments = arguments or PredictionArguments()
    count_threads(num_threads)  # raises before anything is written
    state = process_state()
    file, folder = _target(Path(output), format)
    wanted = wanted_columns(model, arguments)
    with state.main_process_first():  # it alone converts what has to go through a cache
        sources = find_sources(inputs, wanted, split)
    with folder.locked():
        facts = _facts(model, sources, arguments, folder.suffix) if state.is_main_process else {}
        plan = _from_main(state, lambda: _take_up(folder, file, facts, overwrite))
        is_new = plan is None
        if plan is None:
            scans = _scan(state, sources, report)
            plan = {"facts": facts, **_cut(sources, scans, arguments.part_size, folder.suffix)}
        corpus, count = Corpus(sources, plan["files"]), plan["parts"]
        todo: list[int] = _from_main(state, lambda: _begin(folder, plan, is_new))
        if not state.is_main_process:
            folder.lock(shared=True)
        own = [
            (
                folder.part(part, count),
                range(part * arguments.part_size, min((part + 1) * arguments.part_size, len(corpus))),
            )
            for part in todo[state.process_index :: state.num_processes]
        ]
        schema = parquet_schema(Features.from_dict(plan["columns"])) if folder.suffix == ".parquet" else None
        _write_parts(model, corpus, own, schema, arguments, num_threads, report)
        _wait(state)
        if state.is_main_process:
            _end(folder, count, file, overwrite)
        _wait(state)
    return PredictionJob([file] if file else folder.parts(count), len(corpus), count, count - len(todo))


def _write_parts(
    model: PredictMixin,
    corpus: Corpus,
    parts: Sequence[tuple[Path, range]],
    schema: pa.Schema | None,
    arguments: PredictionArguments,
    num_threads: int | None,
    report: Progress | None,
) -> None:
    """Writes the predictions of some documents into a file, of others into another."""
    done, total = 0, sum(len(documents) for _, documents in parts)
    for path, documents in parts:
        with prediction_writer(path, schema) as write:
            for kept, predictions in predict_range(model, corpus, documents, arguments, _threads(num_threads)):
                write(kept, predictions)
                done += len(predictions)
                if report is not None:
                    report("predict", done, total)


def predict_range(
    model: PredictMixin,
    corpus: Corpus,
    documents: range,
    arguments: PredictionArguments,
    num_threads: int | None = None,
) -> Iterator[tuple[Batch, Predictions]]:
    """
    Yields the columns to keep and the predictions of one batch of documents after another.

    Args:
        model ([`XMCForTextClassification`] or [`XMCEnsemble`]): A trained model.
        corpus ([`Corpus`]): The documents.
        documents (`range`): Those of them to predict.
        arguments ([`PredictionArguments`]): What the predictions depend on.
        num_threads (`int`, *optional*): Threads to use; all cores by default.
    """
    for first in documents[:: arguments.batch_size]:
        batch = corpus.read(first, min(first + arguments.batch_size, documents.stop))
        try:
            predictions = predict_documents(model, batch, arguments, num_threads)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{corpus.place(first)}, and those worked on together with it: {error}") from error
        yield {name: batch[name] for name in arguments.keep_columns}, predictions


def predict_documents(
    model: PredictMixin, batch: Batch, arguments: PredictionArguments, num_threads: int | None = None
) -> Predictions:
    """
    The (label, score) pairs of a few documents.

    Args:
        model ([`XMCForTextClassification`] or [`XMCEnsemble`]): A trained model.
        batch (`dict[str, list]`): Texts in the column that `arguments` names, or vectors.
        arguments ([`PredictionArguments`]): What the predictions depend on.
        num_threads (`int`, *optional*): Threads to use; all cores by default.
    """
    columns = {name: pa.array(batch[name]) for name in VECTOR_COLUMNS if name in batch}
    if arguments.text_column in batch:
        columns["text"] = pa.array([text or "" for text in batch[arguments.text_column]], pa.string())
    # With a fingerprint, which would be computed from all of the content.
    dataset = Dataset(pa.table(columns), fingerprint="batch")
    found: Predictions = []
    for scores, indices in predict_batches(
        model,
        dataset,
        arguments.top_k,
        arguments.beam_size,
        arguments.batch_size,
        num_threads,
        predict_with=arguments.predict_with,
    ):
        output = XMCOutput(scores=torch.from_numpy(scores), indices=torch.from_numpy(indices))
        for pairs in model.name_labels(output):
            found.append([pair for pair in pairs if pair[1] >= arguments.threshold])
    return found


def wanted_columns(model: PredictMixin, arguments: PredictionArguments) -> WantedColumns:
    """The columns of the documents that a model reads, and those to keep."""
    members: list[Any] = model.models if isinstance(model, XMCEnsemble) else [model]
    kinds = {reads_text(member) for member in members}
    text = arguments.text_column if True in kinds else None
    return WantedColumns(text, False in kinds, tuple(arguments.keep_columns))


def _threads(num_threads: int | None) -> int | None:
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return num_threads or (None if beside == 1 else max(1, available_cores() // beside))


def _from_main(state: PartialState, make: Callable[[], Any]) -> Any:
    """What the main process makes, in all of them."""
    return broadcast_object_list([make() if state.is_main_process else None])[0]


def _wait(state: PartialState) -> None:
    try:
        state.wait_for_everyone()
    except RuntimeError as error:
        raise OSError(
            "Another process of the job has ended: its own message says why. Finished parts are kept: give the same "
            "command again."
        ) from error


# ---- The plan ----


def check_output_name(output: str | os.PathLike) -> str:
    """The format of a file of predictions, as its name says it."""
    named = Path(output).suffix.lower().removeprefix(".")
    if named not in FORMATS:
        raise ValueError(
            f"`{output}` would hold no {named or 'known format'}: predictions are written as {' or '.join(FORMATS)}. "
            f"Name it so, e.g. `{Path(output).stem}.{FORMATS[0]}`."
        )
    return named


def _target(output: Path, format: str | None) -> tuple[Path | None, PartsFolder]:
    """The file to write, if it is one, and the folder of the parts."""
    if format is not None and format not in FORMATS:
        raise ValueError(f"`{format}` is no format: it is one of {', '.join(FORMATS)}.")
    if output.is_dir() or not (output.suffix or output.is_file()):
        return None, PartsFolder(output, f".{format or FORMATS[0]}")
    named = check_output_name(output)
    if format not in (None, named):
        raise ValueError(f"`{output}` is by its name a file of the format {named}, not {format}. Rename it.")
    return output, PartsFolder(output.with_name(output.name + ".parts"), f".{named}")


def _facts(
    model: PredictMixin, sources: Sequence[DocumentSource], arguments: PredictionArguments, suffix: str
) -> dict[str, Any]:
    """All that the result depends on, fit for JSON."""
    return {
        "hf_xmc": __version__,
        "model": _model_identity(model),
        "inputs": [source.identity() for source in sources],
        "arguments": {**asdict(arguments), "keep_columns": list(arguments.keep_columns), "format": suffix[1:]},
    }


def _model_identity(model: Any) -> dict[str, Any]:
    """A model by its settings and by the content of its files or its commit on the Hub."""
    own = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    identity = {"settings": hashlib.blake2b(repr(sorted(own.items())).encode(), digest_size=16).hexdigest()}
    if not os.path.isdir(model.name_or_path):
        if getattr(model.config, "_commit_hash", None) is None:
            raise ValueError(
                "The model has no files by which a later run could tell that it is the same. Save it with "
                "`save_pretrained` and load it from there."
            )
        return {**identity, "commit": model.config._commit_hash}
    content = hashlib.blake2b(digest_size=16)
    folder = Path(model.name_or_path)
    for place in (folder, *(folder / member for member in member_folders(folder))):
        for path in sorted(place.iterdir()):
            record = path.name in _RECORDS or path.name.endswith(RESULTS_SUFFIX)
            if path.suffix in _MODEL_SUFFIXES and path.is_file() and not record:
                content.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size} ".encode())
                with open(path, "rb") as file:
                    while block := file.read(1 << 22):
                        content.update(block)
    return {**identity, "content": content.hexdigest()}


def _take_up(folder: PartsFolder, file: Path | None, facts: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The plan of an earlier run that can be continued; `None` where the job begins."""
    way_out = "Choose another output, or give `overwrite` (`--overwrite`)."
    folder.lock()
    plan = folder.read_plan(damaged_is_none=overwrite)
    file_exists = file is not None and file.exists() and not overwrite
    if plan is None:
        if file_exists:
            raise FileExistsError(f"`{file}` exists already. {way_out}")
        if folder.holds_files() and not overwrite:
            raise FileExistsError(f"`{folder.path}` exists already and is not empty. {way_out}")
        return None
    different = _differences(plan["facts"], facts)
    if different and not overwrite:
        listed = "".join(f"\n  - {difference}" for difference in different)
        raise ValueError(f"`{folder.path}` belongs to other predictions:{listed}\n{way_out}")
    complete = not folder.unfinished(plan["parts"])
    if file_exists and not complete:
        raise FileExistsError(f"`{file}` exists already. {way_out}")
    return None if different or (file is None and complete and overwrite) else plan


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What a user has to know of two jobs that are not the same."""
    found = []
    if old["hf_xmc"] != new["hf_xmc"]:
        found.append(f"the version of hf_xmc was {old['hf_xmc']} and is {new['hf_xmc']}")
    if old["model"] != new["model"]:
        found.append("the model is another one, or has changed")
    for name, value in new["arguments"].items():
        if old["arguments"].get(name) != value:
            found.append(f"`{name}` was {old['arguments'].get(name)!r} and is {value!r}")
    before, now = ({entry["path"]: entry for entry in facts["inputs"]} for facts in (old, new))
    found += [f"the input `{path}` has changed" for path in now if path in before and before[path] != now[path]]
    found += [f"the input `{path}` is new" for path in now if path not in before]
    found += [f"the input `{path}` is missing" for path in before if path not in now]
    if before == now and list(before) != list(now):
        found.append("the inputs come in another order")
    return found


def _scan(state: PartialState, sources: Sequence[DocumentSource], report: Progress | None) -> list[dict[str, Any]]:
    """What there is in each source; the processes share them."""
    numbers = range(state.process_index, len(sources), state.num_processes)
    own = []
    for number in numbers:
        own.append((number, sources[number].scan()))
        if report is not None:
            report("scan", len(own), len(numbers))
    found = dict(gather_object(own))
    return [found[number] for number in range(len(sources))]


def _cut(
    sources: Sequence[DocumentSource], scans: Sequence[dict[str, Any]], part_size: int, suffix: str
) -> dict[str, Any]:
    """The documents and parts of a plan, fit for JSON."""
    documents = sum(scan["documents"] for scan in scans)
    return {
        "documents": documents,
        "parts": max(1, -(-documents // part_size)),
        "files": [{"documents": scan["documents"], "places": scan["places"]} for scan in scans],
        "columns": common_types(sources, scans).to_dict() if suffix == ".parquet" else {},
    }


def _begin(folder: PartsFolder, plan: dict[str, Any], is_new: bool) -> list[int]:
    """Makes the folder ready and says which parts are to be done."""
    if is_new:
        folder.clear()
        folder.write_plan(plan)
    folder.remove_temporary()
    todo = folder.unfinished(plan["parts"])
    folder.lock(shared=True)
    return todo


def _end(folder: PartsFolder, count: int, file: Path | None, overwrite: bool) -> None:
    """Looks whether all parts are there and joins them, where one file is wanted."""
    missing = folder.unfinished(count)
    if missing:
        raise OSError(
            f"`{folder.part(missing[0], count)}` is missing: it was removed while the job ran. Give the same command "
            "again."
        )
    if file is None:
        return
    if file.exists() and not overwrite:
        # It is ours if an earlier run was killed after it had joined the parts.
        joined = folder.path / ".joined"
        join_files(folder.parts(count), joined)
        if not filecmp.cmp(joined, file, shallow=False):
            raise FileExistsError(f"`{file}` exists already. Its new content is in `{folder.path}`; remove one.")
    else:
        join_files(folder.parts(count), file)
    folder.remove()
