"""Prediction of large corpora: many files, several processes, and exact resumption of an interrupted job."""

from __future__ import annotations

import filecmp
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, Value
from transformers.utils import CONFIG_NAME

from ..data.corpus import Batch, Corpus, CorpusColumns, Source, find_sources
from ..modeling_utils import PredictMixin, named
from ..parallel.process_group import ProcessGroup
from ..parallel.stage_cache import PieceFolder, Runtime, share_pieces
from ..remote_code import model_files
from ..utils import available_cores, check_count, count_threads, join_texts
from ..version import __version__
from .predict import BATCH_SIZE, chunk_size, document_features, members_of, reads_text
from .writers import FORMATS, PREDICTED, Predictions, join_files, parquet_schema, prediction_writer

# Names of parts in all formats, finished or not.
_PART_NAMES = r"\.?part-\d+-of-\d+\.(jsonl|parquet)(\..*)?"
_TOKENIZER_SUFFIXES = (".txt", ".model")


@dataclass(frozen=True)
class PredictionArguments:
    """
    What predictions depend on, besides the model and the documents.

    All others are those of [`ExtremeTextClassificationPipeline`].

    Args:
        text_column (`str` or `Sequence[str]`, *optional*): Column of the texts, or several. Default: the model's.
        sheet (`str`, *optional*): Sheet of an Excel file.
        keep_columns (`Sequence[str]`, *optional*):
            Columns of the input to write beside the predictions, such as an id.
        part_size (`int`, *optional*, defaults to 16384): Documents per part. A killed process loses at most one part.
    """

    top_k: int | None = None
    threshold: float = 0.0
    beam_size: int | None = None
    predict_with: str | None = None
    labels: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    under: Sequence[str] | None = None
    level: int | None = None
    with_parents: bool = False
    text_column: str | Sequence[str] | None = None
    sheet: str | None = None
    keep_columns: Sequence[str] = ()
    batch_size: int = BATCH_SIZE
    part_size: int = 16_384

    def __post_init__(self) -> None:
        for name in ("top_k", "level", "beam_size", "batch_size", "part_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least=0 if name == "beam_size" else 1)
        if not math.isfinite(self.threshold):
            raise ValueError(f"`threshold` must be a number, not {self.threshold}.")
        reserved = next((name for name in self.keep_columns if name in PREDICTED), None)
        if reserved is not None:
            raise ValueError(f"`keep_columns` contains `{reserved}`, a column of the predictions. Rename that column.")


@dataclass(frozen=True)
class PredictionJob:
    """
    Result of [`predict_corpus`]: its files in order, and the numbers of documents, of parts and of parts done before.
    """

    files: list[Path]
    documents: int
    parts: int
    resumed: int


def predict_corpus(
    model: PredictMixin,
    inputs: Sequence[str | os.PathLike | Dataset],
    output: str | os.PathLike,
    arguments: PredictionArguments | None = None,
    *,
    split: str | None = None,
    format: str | None = None,
    overwrite: bool = False,
    runtime: Runtime = Runtime(),
) -> PredictionJob:
    """
    Predicts the documents of many files, part by part.

    Call it again after an interruption to continue; the result is the same to the byte. Under `torchrun` or
    `accelerate launch`, processes share the parts.

    Args:
        model ([`XMCForTextClassification`] or [`XMCEnsemble`]): A model loaded by `from_pretrained`.
        inputs (`Sequence`): Files, patterns, folders, Hub ids or datasets, see [`find_sources`].
        output (`str` or `os.PathLike`):
            A folder (a name without extension), which gets one file per part; or a file, into which the parts are
            joined at the end. Until then they are in the folder `OUTPUT.parts`.
        arguments ([`PredictionArguments`], *optional*): What the predictions depend on.
        split (`str`, *optional*): Split of folders and datasets that have several.
        format (`str`, *optional*):
            `"jsonl"` or `"parquet"`. Default: the extension of the file; JSON lines in a folder.
        overwrite (`bool`, *optional*, defaults to `False`):
            Whether to replace predictions of other documents, another model or other arguments. An interrupted job
            continues in either case.
        runtime ([`Runtime`], *optional*):
            Threads (by default all cores, shared by the processes of a machine) and progress callback, which counts
            the documents of this process.
    """
    arguments = arguments or PredictionArguments()
    # These raise before anything is written.
    count_threads(runtime.num_threads)
    model.restrict(arguments.labels, arguments.exclude, arguments.under)
    model.check_hierarchy(arguments.level, arguments.with_parents)
    processes = ProcessGroup.current()
    if runtime.num_threads is None and processes.per_node > 1:
        runtime = replace(runtime, num_threads=max(1, available_cores() // processes.per_node))
    file, folder, suffix = _resolve_output(Path(output), format)
    sources = find_sources(inputs, corpus_columns(model, arguments), split)
    with folder.locked():
        identity = _job_identity(model, sources, arguments, suffix) if processes.is_main else {}
        old_plan = processes.from_main(lambda: _find_plan(folder, file, identity, overwrite))
        corpus = _load_corpus(sources, processes, runtime)
        plan = processes.from_main(lambda: _start_job(folder, old_plan, identity, corpus))
        if not processes.is_main:
            folder.lock(shared=True)
        write_parts = _part_writer(model, corpus, folder, plan, arguments, runtime)
        missing = share_pieces(processes, folder, plan["parts"], write_parts)
        if processes.is_main and file is not None:
            _join_parts(folder, plan["parts"], file, overwrite)
        processes.wait()
    files = [file] if file else folder.pieces(plan["parts"])
    return PredictionJob(files, len(corpus), plan["parts"], plan["parts"] - missing)


def _part_writer(
    model: PredictMixin,
    corpus: Corpus,
    folder: PieceFolder,
    plan: dict[str, Any],
    arguments: PredictionArguments,
    runtime: Runtime,
) -> Callable[[Sequence[int]], None]:
    """A function that predicts and writes some of the parts."""
    size, columns = arguments.part_size, plan["columns"]
    has_names = model.labels is not None and bool(model.labels.other_names)
    schema = None if columns is None else parquet_schema(Features.from_dict(columns), has_names)

    def write_parts(parts: Sequence[int]) -> None:
        ranges = [range(part * size, min((part + 1) * size, len(corpus))) for part in parts]
        done, total = 0, sum(map(len, ranges))
        for part, documents in zip(parts, ranges, strict=True):
            with prediction_writer(folder.piece(part, plan["parts"]), schema) as write:
                for kept, predictions in predict_range(model, corpus, documents, arguments, runtime.num_threads):
                    write(kept, predictions)
                    done += len(predictions)
                    runtime.report("predict", done, total)

    return write_parts


def predict_range(
    model: PredictMixin,
    corpus: Corpus,
    documents: range,
    arguments: PredictionArguments,
    num_threads: int | None = None,
) -> Iterator[tuple[Batch, Predictions]]:
    """Yields the columns to keep and the predictions of one chunk of documents (indices of a corpus) after another."""
    size = chunk_size(model, arguments.batch_size)
    for first in documents[::size]:
        batch = corpus.read(first, min(first + size, documents.stop))
        try:
            predictions = predict_documents(model, batch, arguments, num_threads)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{corpus.location(first)} or one of the following {size}: {error}") from error
        yield {name: batch[name] for name in arguments.keep_columns}, predictions


def predict_documents(
    model: PredictMixin, batch: Batch, arguments: PredictionArguments, num_threads: int | None = None
) -> Predictions:
    """The labels of one chunk of documents: texts in the columns of [`corpus_columns`], or vectors."""
    documents, columns = dict(batch), corpus_columns(model, arguments).text
    if columns and set(columns) <= set(batch):
        documents["text"] = [join_texts(texts) for texts in zip(*(batch[name] for name in columns), strict=True)]
    features = document_features(model, documents, arguments.batch_size, num_threads)
    restriction = model.restrict(arguments.labels, arguments.exclude, arguments.under)
    search = arguments.top_k, arguments.beam_size, num_threads, arguments.predict_with
    with torch.no_grad():
        hierarchy: dict[str, Any] = {"level": arguments.level, "with_parents": arguments.with_parents}
        output = model.find_labels(features, *search, restriction=restriction, **hierarchy)
    named_labels, names = model.name_labels(output), model.checked_labels().other_names
    return [[named(pair, names) for pair in pairs if pair[1] >= arguments.threshold] for pairs in named_labels]


def corpus_columns(model: PredictMixin, arguments: PredictionArguments) -> CorpusColumns:
    """The columns that a model reads, and those to keep."""
    kinds = {reads_text(member) for member in members_of(model)}
    text = arguments.text_column or model.text_columns
    columns = () if True not in kinds else (text,) if isinstance(text, str) else tuple(text)
    return CorpusColumns(columns, False in kinds, tuple(arguments.keep_columns), arguments.sheet)


def _load_corpus(sources: Sequence[Source], processes: ProcessGroup, runtime: Runtime) -> Corpus:
    """Loads all sources. Processes share the conversion of files; each file is converted once."""
    own = processes.own(sources)
    for done, source in enumerate(own, 1):
        source.dataset  # noqa: B018
        runtime.report("load", done, len(own))
    processes.wait()
    return Corpus(sources)


# ---- The plan ----


def check_output_name(output: str | os.PathLike) -> str:
    """The format of an output file by its extension."""
    extension = Path(output).suffix.lower().removeprefix(".")
    if extension not in FORMATS:
        raise ValueError(
            f"`{output}` does not name a format. Predictions are written as {' or '.join(FORMATS)}: name the file, "
            f"e.g., `{Path(output).stem}.{FORMATS[0]}`."
        )
    return extension


def _resolve_output(output: Path, format: str | None) -> tuple[Path | None, PieceFolder, str]:
    """The output file (`None` for a folder), the folder of the parts and their extension."""
    if format is not None and format not in FORMATS:
        raise ValueError(f"`format={format!r}` is not one of {', '.join(FORMATS)}.")
    file: Path | None = None
    if output.is_dir() or not (output.suffix or output.is_file()):
        folder, extension = output, format or FORMATS[0]
    else:
        file, folder, extension = output, output.with_name(output.name + ".parts"), check_output_name(output)
        if format not in (None, extension):
            raise ValueError(f"`{output}` has the extension of {extension}, not of `format={format!r}`. Rename it.")
    pattern = f"part-{{index:05d}}-of-{{count:05d}}.{extension}"
    return file, PieceFolder(folder, pattern, _PART_NAMES), f".{extension}"


def _job_identity(
    model: PredictMixin, sources: Sequence[Source], arguments: PredictionArguments, suffix: str
) -> dict[str, Any]:
    """Everything that the result depends on, as JSON."""
    options = {**asdict(arguments), "keep_columns": list(arguments.keep_columns), "format": suffix[1:]}
    return {
        "hf_xmc": __version__,
        "model": _model_identity(model),
        "inputs": [source.identity() for source in sources],
        "arguments": {**options, "dtype": str(model.dtype)},  # type: ignore[attr-defined]
    }


def _model_identity(model: Any) -> dict[str, Any]:
    """Digests of a model's settings and files; its commit if it comes from the Hub."""
    settings = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
    identity = {"settings": hashlib.blake2b(repr(sorted(settings.items())).encode(), digest_size=16).hexdigest()}
    if not os.path.isdir(model.name_or_path):
        if getattr(model.config, "_commit_hash", None) is None:
            raise ValueError(
                "The model has no files, so a later run could not recognise it. Save it with `save_pretrained` and "
                "load it from there."
            )
        return {**identity, "commit": model.config._commit_hash}
    content = hashlib.blake2b(digest_size=16)
    root = Path(model.name_or_path)
    for folder in (root, *(root / name for name in getattr(model.config, "members", None) or ())):
        names = {CONFIG_NAME, *model_files(folder)}
        for path in sorted(folder.iterdir()):
            if path.is_file() and (path.name in names or path.suffix in _TOKENIZER_SUFFIXES):
                content.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size} ".encode())
                with open(path, "rb") as file:
                    while block := file.read(1 << 22):
                        content.update(block)
    return {**identity, "content": content.hexdigest()}


def _find_plan(
    folder: PieceFolder, file: Path | None, identity: dict[str, Any], overwrite: bool
) -> dict[str, Any] | None:
    """Locks the folder and returns the plan of an earlier run to continue; `None` for a new job."""
    way_out = "Choose another output, or give `overwrite` (`--overwrite`)."
    folder.lock()
    plan = folder.read_plan(ignore_damage=overwrite)
    file_exists = file is not None and file.exists() and not overwrite
    if plan is None:
        if file_exists:
            raise FileExistsError(f"`{file}` exists already. {way_out}")
        if folder.has_files() and not overwrite:
            raise FileExistsError(f"`{folder.path}` exists already and is not empty. {way_out}")
        return None
    old_identity = plan.get("identity")
    differences = _differences(old_identity, identity) if old_identity else ["another version of hf_xmc wrote it"]
    if differences and not overwrite:
        listed = "".join(f"\n  - {difference}" for difference in differences)
        raise ValueError(f"`{folder.path}` belongs to another job:{listed}\n{way_out}")
    is_complete = not folder.missing(plan["parts"])
    if file_exists and not is_complete:
        raise FileExistsError(f"`{file}` exists already. {way_out}")
    return None if differences or (file is None and is_complete and overwrite) else plan


def _start_job(
    folder: PieceFolder, plan: dict[str, Any] | None, identity: dict[str, Any], corpus: Corpus
) -> dict[str, Any]:
    """Prepares the folder, for a new job if `plan` is `None`, and lets the other processes in."""
    if plan is None:
        arguments = identity["arguments"]
        columns = _common_types(corpus.sources).to_dict() if arguments["format"] == "parquet" else None
        plan = {"identity": identity, "parts": max(1, -(-len(corpus) // arguments["part_size"])), "columns": columns}
        folder.clear()
        folder.write_plan(plan)
    folder.remove_temporary()
    folder.lock(shared=True)
    return plan


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describes how two jobs differ."""
    differences = []
    if old["hf_xmc"] != new["hf_xmc"]:
        differences.append(f"the version of hf_xmc was {old['hf_xmc']} and is {new['hf_xmc']}")
    if old["model"] != new["model"]:
        differences.append("the model is different")
    for name, value in new["arguments"].items():
        if old["arguments"].get(name) != value:
            differences.append(f"`{name}` was {old['arguments'].get(name)!r} and is {value!r}")
    before, now = ({entry["path"]: entry for entry in identity["inputs"]} for identity in (old, new))
    differences += [f"the input `{path}` has changed" for path in now if path in before and before[path] != now[path]]
    differences += [f"the input `{path}` is new" for path in now if path not in before]
    differences += [f"the input `{path}` is missing" for path in before if path not in now]
    if before == now and list(before) != list(now):
        differences.append("the order of the inputs is different")
    return differences


def _common_types(sources: Sequence[Source]) -> Features:
    """Types of the columns to keep, on which all sources must agree."""
    types: dict[str, tuple[Any, str]] = {}
    for source in sources:
        for name, kind in source.kept_types().items():
            if kind is None:
                raise ValueError(
                    f"Column `{name}` of `{source.name}` contains values of several types, lists or objects, which do "
                    "not fit into a parquet column. Write JSON lines, or leave it out."
                )
            known, where = types.get(name, (Value("null"), ""))
            if Value("null") in (known, kind):
                types[name] = (known, where) if kind == Value("null") else (kind, source.name)
            elif known != kind:
                raise ValueError(
                    f"Column `{name}` is {known} in `{where}` but {kind} in `{source.name}`. Write JSON lines, or "
                    "convert one of them."
                )
    return Features({name: kind for name, (kind, _) in types.items()})


def _join_parts(folder: PieceFolder, count: int, file: Path, overwrite: bool) -> None:
    """Joins all parts into one file and removes their folder."""
    if file.exists() and not overwrite:
        # Only the output of this job may be here: an earlier run was killed after joining the parts.
        joined = folder.path / ".joined"
        join_files(folder.pieces(count), joined)
        if not filecmp.cmp(joined, file, shallow=False):
            raise FileExistsError(f"`{file}` exists already. Its new content is in `{folder.path}`: remove one.")
    else:
        join_files(folder.pieces(count), file)
    folder.remove()
