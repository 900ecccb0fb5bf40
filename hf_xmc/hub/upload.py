"""Uploads: the published files of a model, in one commit, without pickles; and self-contained copies."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from transformers.utils import CONFIG_NAME

from ..remote_code import CLASSES, SelfContainedModel, add_code, code_files, member_folders, remove_code
from ..scorer import SCORER_FILE
from ..serialization import (
    ENSEMBLE_FILE,
    MAX_SHARD_SIZE,
    RECORD_FILE,
    RESULTS_SUFFIX,
    TRAINING_ARGS_FILE,
    new_folder,
    read_json,
    write_json,
)
from ..tfidf import VOCABULARY_FILE
from ..training.record import public_name
from .model_card import CARD_FILE, EVAL_RESULTS_FOLDER, CardOptions, write_model_card

# Suffixes of the files that a model folder consists of, tokenizers and cards included. No pickles: loading one can
# run any code.
_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".md", ".png", ".py", ".jinja", ".tiktoken", ".spm", ".codes")
_NAMES = ("LICENSE", "NOTICE")
# Checkpoints, temporary and hidden files; results, which the training record repeats without local paths.
_PRIVATE = ("checkpoint-*", "_*", ".*", "*.tmp", f"*{RESULTS_SUFFIX}")
_MEMBER = re.compile(r"member-\d+")
# Parts of a model that another model may lack. Left in the repository, they would be loaded with the new model, or
# reveal documents of the old one.
_PART_STEMS = ("model", "ranker", "ranker_tree", "label_tree", "tfidf", "label_vectors", "knn", "knn_vectors")
_PART_PATTERNS = (
    *(f"{stem}{rest}" for stem in _PART_STEMS for rest in (".safetensors", ".safetensors.index.json")),
    *(f"{stem}-?????-of-?????.safetensors" for stem in _PART_STEMS),
    *(VOCABULARY_FILE, SCORER_FILE, "labels.json", ENSEMBLE_FILE, "member-[0-9]*/*"),
)
# Seconds before each retry of a failed upload.
_WAITS = (1, 5)

logger = logging.getLogger(__name__)

# Its pool has one worker: background uploads are committed in the order in which they were started.
_BACKGROUND = HfApi()


@dataclass
class Destination:
    """
    Target of an upload, in terms of `HfApi.upload_folder`.

    Repository and branch are created if they do not exist. Without an owner in `repo_id`, the owner of the token is
    used; without a token, the one of `hf auth login`. With `create_pr`, a pull request is opened instead of a commit,
    with `run_as_future` the upload runs in the background and a `Future` of the commit is returned.
    """

    repo_id: str
    repo_type: str = "model"
    private: bool | None = None
    token: str | bool | None = None
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None
    commit_description: str | None = None
    run_as_future: bool = False


# ---- Files ----


def check_saved_model(folder: str | os.PathLike) -> None:
    """Raises an error if a folder does not contain a model of hf_xmc."""
    path = Path(folder, CONFIG_NAME)
    if not path.is_file():
        raise FileNotFoundError(f"`{folder}` does not contain a saved model: `{CONFIG_NAME}` is missing.")
    kind = read_json(path).get("model_type")
    if kind not in CLASSES:
        raise ValueError(f"`{folder}` contains a model of type {kind!r}, which is not a model of hf_xmc.")


def publishable_files(folder: str | os.PathLike, ignore: Sequence[str] = ()) -> list[str]:
    """Returns the files of a model folder that are uploaded, except `ignore`, and warns about those not allowed."""
    members = member_folders(folder)
    names: list[str] = []
    refused: list[str] = []
    for path in sorted(Path(folder).rglob("*")):
        name = path.relative_to(folder)
        first = name.parts[0]
        is_result = first == EVAL_RESULTS_FOLDER
        parts = name.parts[1:] if is_result else name.parts
        is_private = any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in (*_PRIVATE, *ignore))
        # An earlier, larger ensemble may have left members that the configuration no longer lists.
        is_stale = bool(_MEMBER.fullmatch(first)) and first not in members
        if is_private or is_stale or not path.is_file():
            continue
        is_allowed = path.name in _NAMES or path.suffix in ((".yaml",) if is_result else _SUFFIXES)
        (names if is_allowed else refused).append(name.as_posix())
    if refused:
        allowed = ", ".join(_SUFFIXES)
        logger.warning("Not uploaded from `%s`: %s. Allowed suffixes: %s.", folder, ", ".join(refused), allowed)
    return names


def stage_model(
    folder: str | os.PathLike,
    target: str | os.PathLike,
    *,
    self_contained: bool = True,
    put: Callable[[Path, Path], Any] = shutil.copyfile,
) -> None:
    """
    Fills `target` with the published files of a model: without local paths, with complete code or none.

    `put` copies or links a file that is published unchanged.
    """
    models = ["", *member_folders(folder)]
    for name in publishable_files(folder):
        source, output = Path(folder, name), Path(target, name)
        output.parent.mkdir(parents=True, exist_ok=True)
        content = _published_json(source) if name.rpartition("/")[0] in models else None
        if content is None:
            put(source, output)
        else:
            write_json(output, content, indent=2)
    for model in models:
        remove_code(Path(target, model))
    if self_contained:
        add_code(target)


def _published_json(path: Path) -> dict[str, Any] | None:
    """Returns the published content of a JSON file with local paths; `None` for files that are published unchanged."""
    if path.name == CONFIG_NAME:
        config = read_json(path)
        encoder = config.get("encoder_config") or {}
        if "_name_or_path" in encoder:
            config["encoder_config"] = {**encoder, "_name_or_path": public_name(encoder["_name_or_path"])}
        return config
    if path.name == TRAINING_ARGS_FILE:
        options = read_json(path)
        return {**options, "encoder_name": public_name(options.get("encoder_name")), "embedding_cache": None}
    if path.name == ENSEMBLE_FILE:
        content = read_json(path)
        return {**content, "models": [public_name(name) for name in content.get("models") or []]}
    return None


def _link(source: Path, target: Path, *, hard: bool = False) -> None:
    try:
        (os.link if hard else os.symlink)(source.resolve(), target)
    except OSError:  # not supported by the file system
        shutil.copyfile(source, target)


def export_model(folder: str | os.PathLike, output: str | os.PathLike) -> list[str]:
    """
    Copies a saved model and the code that loads it into a new or empty folder, and returns the names of the files.
    """
    output = Path(output)
    check_saved_model(folder)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"`{output}` exists and is not empty. Choose another folder for the copy.")
    with new_folder(output) as temporary:
        stage_model(folder, temporary)
    return publishable_files(output)


# ---- Uploads ----


def push_folder(
    folder: str | os.PathLike, destination: Destination, *, self_contained: bool = True, source: str | None = None
) -> Any:
    """
    Uploads the folder of a saved model; returns the commit, or a `Future` of it.

    Files that the repository already has are not sent again, nor are large files of an interrupted upload: calling it
    again completes the upload. Parts of an earlier model that this one lacks are deleted from the repository. `source`
    is the name of the folder in messages.
    """
    check_saved_model(folder)

    def stage(target: str) -> None:
        stage_model(folder, target, self_contained=self_contained, put=_link)

    delete_patterns = [*_PART_PATTERNS, *(path.name for path in code_files())]
    return upload(stage, destination, source or f"`{folder}`", delete_patterns=delete_patterns)


def push_checkpoint(
    folder: str | os.PathLike, destination: Destination, ignore: Sequence[str] = (), path_in_repo: str | None = None
) -> Any:
    """
    Uploads a checkpoint in the background. The checkpoint may be deleted in the meantime.

    With `path_in_repo`, this folder of the repository becomes a copy of the checkpoint; otherwise the model of the
    checkpoint becomes the model of the repository. Returns a `Future` of the commit.
    """
    linked = tempfile.mkdtemp(prefix="_push-", dir=Path(folder).parent)
    for name in publishable_files(folder, ignore):
        Path(linked, name).parent.mkdir(parents=True, exist_ok=True)
        _link(Path(folder, name), Path(linked, name), hard=True)
    destination = replace(destination, run_as_future=True)
    if path_in_repo is None:
        job = push_folder(linked, destination)
    else:
        job = upload(linked, destination, f"`{folder}`", delete_patterns=["*"], path_in_repo=path_in_repo)
    job.add_done_callback(lambda _: shutil.rmtree(linked, ignore_errors=True))
    return job


def push_model(
    model: SelfContainedModel,
    repo_id: str,
    *,
    self_contained: bool = True,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    tags: Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """
    Uploads a model with the card and the records of the folder that it was loaded from, or with a new card.

    The arguments are those of [`~XMCForTextClassification.push_to_hub`]; `options` are fields of [`Destination`].
    """
    destination = Destination(repo_id, **{"commit_message": "Upload model", **options})
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, self_contained=False, max_shard_size=max_shard_size)
        source = Path(model.config._name_or_path or folder)
        for name in publishable_files(source) if _is_folder_of(model, source) else ():
            if _is_record(name) and not Path(folder, name).exists():
                Path(folder, name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, Path(folder, name))
        if not Path(folder, CARD_FILE).is_file() and not _has_card(destination):
            write_model_card(folder, CardOptions(model_name=repo_id, tags=list(tags or ())))
        return push_folder(folder, destination, self_contained=self_contained, source="The model")


def _is_folder_of(model: SelfContainedModel, folder: Path) -> bool:
    """Whether a folder contains a model of this type; a member of an ensemble names the folder of the ensemble."""
    path = folder / CONFIG_NAME
    return path.is_file() and read_json(path).get("model_type") == model.config.model_type


def _is_record(name: str) -> bool:
    """Whether a file describes a model, or a member of an ensemble, instead of being part of it."""
    first, _, rest = name.partition("/")
    name = rest if _MEMBER.fullmatch(first) else name
    records = (CARD_FILE, RECORD_FILE, TRAINING_ARGS_FILE, ENSEMBLE_FILE)
    return name in records or name.endswith(".png") or name.startswith(f"{EVAL_RESULTS_FOLDER}/")


def _has_card(destination: Destination) -> bool:
    if "/" not in destination.repo_id:
        return False
    return HfApi(token=destination.token).file_exists(destination.repo_id, CARD_FILE, revision=destination.revision)


def create_repo(destination: Destination) -> str:
    """Creates the repository if it does not exist and returns its id with the owner."""
    return attempt(lambda: _create_repo(destination), destination, "The model")


def _create_repo(destination: Destination) -> str:
    options: dict[str, Any] = {"repo_type": destination.repo_type, "private": destination.private, "exist_ok": True}
    return HfApi(token=destination.token).create_repo(destination.repo_id, **options).repo_id


def upload(
    folder: str | os.PathLike | Callable[[str], None],
    destination: Destination,
    source: str,
    *,
    delete_patterns: list[str] | None = None,
    path_in_repo: str | None = None,
) -> Any:
    """
    Uploads a folder with `HfApi.upload_folder`: one commit, except for folders of several hundred files.

    `folder` may be a function that fills a folder. `source` is its name in messages. Files of the repository that
    match `delete_patterns` and that the folder lacks are deleted.
    """
    api = HfApi(token=destination.token)
    revision = destination.revision

    def send() -> Any:
        where: dict[str, Any] = {"repo_id": _create_repo(destination), "repo_type": destination.repo_type}
        if revision is not None and not revision.startswith("refs/") and not destination.create_pr:
            api.create_branch(**where, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as staged:
            if callable(folder):
                folder(staged)
            return api.upload_folder(
                **where,
                folder_path=staged if callable(folder) else str(folder),
                path_in_repo=path_in_repo,
                delete_patterns=delete_patterns,
                commit_message=destination.commit_message or "Upload with hf_xmc",
                commit_description=destination.commit_description,
                revision=revision,
                create_pr=destination.create_pr,
            )

    if destination.run_as_future:
        return _BACKGROUND.run_as_future(attempt, send, destination, source)
    return attempt(send, destination, source)


def attempt(action: Callable[[], Any], destination: Destination, source: str) -> Any:
    """
    Runs an action on the Hub, retries it after transient errors and explains other errors.

    A pull request is not retried, because that would open another one. `source` names the upload in messages.
    """
    with _explained(source, destination.repo_id):
        for wait in (*_WAITS, None):
            try:
                return action()
            except HTTPError as error:
                if wait is None or destination.create_pr or not _is_transient(error):
                    raise
                logger.warning("Uploading to `%s` again in %s s: %s", destination.repo_id, wait, error)
                time.sleep(wait)
    return None


def _is_transient(error: HTTPError) -> bool:
    """Whether a retry may succeed: no connection, a server error or too many requests."""
    if not isinstance(error, HfHubHTTPError) or error.response is None:
        return True
    return error.response.status_code >= 500 or error.response.status_code in (408, 429)


@contextmanager
def _explained(source: str, repo_id: str) -> Iterator[None]:
    """Turns errors of the Hub into an `OSError` that explains them."""
    advice = f"{source} is unchanged. Run the upload again: files that were sent are not sent twice."
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403) or isinstance(error, RepositoryNotFoundError):
            advice = "Log in with `hf auth login` or pass a `token` with write access."
        raise OSError(f"The upload to `{repo_id}` failed ({status}): {error} {advice}") from error
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise OSError(f"The Hub cannot be reached for the upload to `{repo_id}`: {error} {advice}") from error
