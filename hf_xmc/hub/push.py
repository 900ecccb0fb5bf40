"""Uploads: all files of a model in one commit, no pickles, nothing twice."""

from __future__ import annotations

import json
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

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils import CONFIG_NAME

from ..remote_code import SelfContainedModel, code_files, member_folders, with_code
from ..serialization import MAX_SHARD_SIZE, read_json
from .card_data import CardOptions
from .model_card import CARD_FILE, write_model_card
from .published_files import (
    MEMBER,
    check_saved_model,
    is_record,
    publishable_files,
    published_json,
)

# Parts of a model that another one need not have: in the repository they would be taken for the new one's. Labels and
# tree are in the subfolders of an ensemble.
_PARTS = re.compile(
    r"(ranker|model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|ranker_tree\.safetensors|tfidf\.safetensors|"
    r"tfidf_vocab\.txt|labels\.json|label_tree\.safetensors|ensemble\.json"
)

# Seconds before an upload that failed is tried once more.
_WAITS = (1, 5)

logger = logging.getLogger(__name__)


@dataclass
class Destination:
    """
    Where an upload goes.

    Args:
        repo_id (`str`): Repository, made where it is missing; without an owner that of the token.
        repo_type (`str`, *optional*, defaults to `"model"`): `"model"` or `"dataset"`.
        private (`bool`, *optional*): Whether a new repository is private.
        token (`str` or `bool`, *optional*): Token; that of `hf auth login` by default.
        revision (`str`, *optional*): Branch, made where it is missing; `main` by default.
        create_pr (`bool`, *optional*, defaults to `False`): Whether to open a pull request instead of committing.
        commit_message (`str`, *optional*): First line of the commit.
        commit_description (`str`, *optional*): The rest of it.
        run_as_future (`bool`, *optional*, defaults to `False`):
            Whether to return at once, with a `Future` of the result.
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


def push_folder(
    folder: str | os.PathLike,
    destination: Destination,
    *,
    self_contained: bool = True,
    ignore: Sequence[str] = (),
    source: str | None = None,
) -> Any:
    """
    Uploads the folder of a saved model in one commit.

    Files that are in the repository already are not sent again, and large files of an upload that was interrupted
    neither: calling it once more completes it. Parts of an earlier model that this one has not are deleted there.

    Args:
        folder (`str` or `os.PathLike`):
            Folder of a model.
        destination ([`Destination`]):
            Where to.
        self_contained (`bool`, *optional*, defaults to `True`):
            Whether the code that loads the model goes along. The folder itself stays as it is.
        ignore (`Sequence[str]`, *optional*):
            Patterns of names to leave out.
        source (`str`, *optional*):
            What to call it in messages; the folder by default.

    Returns:
        `CommitInfo`: the commit, or a `Future` of it.
    """
    check_saved_model(folder)
    code = {path.name: path for path in code_files()}
    models = {"", *member_folders(folder)}
    additions = []
    for name in publishable_files(folder, ignore):
        place, _, file = name.rpartition("/")
        content = published_json(Path(folder, name)) if place in models else None
        if content is not None:
            content = with_code(content) if name == CONFIG_NAME and self_contained else content
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            additions.append(CommitOperationAdd(name, text.encode()))
        elif place not in models or file not in code:
            additions.append(CommitOperationAdd(name, str(Path(folder, name))))
    if self_contained:
        additions += [CommitOperationAdd(name, str(path)) for name, path in code.items()]

    def stale(name: str) -> bool:
        first, place, file = name.partition("/")[0], *name.rpartition("/")[::2]
        if place and MEMBER.fullmatch(first) and first not in models:
            return True  # a model of an earlier, larger ensemble
        return place in models and (bool(_PARTS.fullmatch(file)) or file in code)

    return commit(additions, destination, source or f"`{folder}`", stale)


def push_checkpoint(
    folder: str | os.PathLike, destination: Destination, ignore: Sequence[str] = (), path_in_repo: str | None = None
) -> Any:
    """
    Uploads a checkpoint in the background; it may be deleted meanwhile.

    Args:
        folder (`str` or `os.PathLike`):
            The checkpoint.
        destination ([`Destination`]):
            Where to.
        ignore (`Sequence[str]`, *optional*):
            Patterns of names to leave out.
        path_in_repo (`str`, *optional*):
            Folder of the repository for all of its files; by default its model becomes that of the repository.

    Returns:
        `Future`: of the commit.
    """
    held = tempfile.mkdtemp(prefix="_push-", dir=Path(folder).parent)
    names = publishable_files(folder, ignore)
    for name in names:
        Path(held, name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(Path(folder, name), Path(held, name))
        except OSError:  # not every file system has links
            shutil.copyfile(Path(folder, name), Path(held, name))
    destination = replace(destination, run_as_future=True)
    if path_in_repo is None:
        job = push_folder(held, destination)
    else:
        additions = [CommitOperationAdd(f"{path_in_repo}/{name}", str(Path(held, name))) for name in names]
        job = commit(additions, destination, f"`{folder}`")
    job.add_done_callback(lambda _: shutil.rmtree(held, ignore_errors=True))
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
    Uploads a model, with the card and the records of the folder that it was loaded from, or with a new card.

    Args:
        model ([`XMCForTextClassification`] or [`XMCEnsemble`]):
            A trained model.
        repo_id (`str`):
            Name of the repository, made where it is missing.
        self_contained (`bool`, *optional*, defaults to `True`):
            Whether the code that loads the model goes along.
        max_shard_size (`int` or `str`, *optional*, defaults to `"50GB"`):
            Size above which weights and ranker are written as several files.
        tags (`Sequence[str]`, *optional*):
            Further tags of a new card.
        options:
            Further fields of [`Destination`].
    """
    destination = Destination(repo_id, **{"commit_message": "Upload model", **options})
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, self_contained=False, max_shard_size=max_shard_size)
        source = Path(model.config._name_or_path or folder)
        for name in publishable_files(source) if _is_of(source, model) else ():
            if is_record(name) and not Path(folder, name).exists():
                Path(folder, name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, Path(folder, name))
        if not Path(folder, CARD_FILE).is_file() and not _has_card(destination):
            write_model_card(folder, CardOptions(model_name=repo_id, tags=list(tags or ())))
        return push_folder(folder, destination, self_contained=self_contained, source="The model")


def _is_of(folder: Path, model: SelfContainedModel) -> bool:
    """Whether a folder is that of a model; a model of an ensemble names the ensemble's as its own."""
    path = folder / CONFIG_NAME
    return path.is_file() and read_json(path).get("model_type") == model.config.model_type


def _has_card(destination: Destination) -> bool:
    if "/" not in destination.repo_id:
        return False
    return HfApi(token=destination.token).file_exists(destination.repo_id, CARD_FILE, revision=destination.revision)


def create_repo(destination: Destination) -> str:
    """Makes the repository where it is missing; returns its id, owner included."""
    api = HfApi(token=destination.token)
    with _explained("The model", destination.repo_id):
        made = api.create_repo(
            destination.repo_id, repo_type=destination.repo_type, private=destination.private, exist_ok=True
        )
    return made.repo_id


def commit(
    additions: list[CommitOperationAdd],
    destination: Destination,
    source: str,
    stale: Callable[[str], bool] = lambda name: False,
) -> Any:
    """
    Sends files in one commit. What fails for a moment is tried again.

    Args:
        additions (`list[CommitOperationAdd]`): The files.
        destination ([`Destination`]): Where to.
        source (`str`): What they are, for messages.
        stale (`Callable[[str], bool]`, *optional*): Files to delete where the commit does not have them.
    """
    api = HfApi(token=destination.token)

    def send() -> Any:
        for wait in (*_WAITS, None):
            try:
                return _send_once(api, additions, destination, stale)
            except HTTPError as error:
                if wait is None or destination.create_pr or not _may_pass(error):
                    raise
                logger.warning("The upload to `%s` is tried again in %s s: %s", destination.repo_id, wait, error)
                time.sleep(wait)

    def explained() -> Any:
        with _explained(source, destination.repo_id):
            return send()

    return api.run_as_future(explained) if destination.run_as_future else explained()


def _send_once(
    api: HfApi, additions: list[CommitOperationAdd], destination: Destination, stale: Callable[[str], bool]
) -> Any:
    where: dict[str, Any] = {"repo_id": create_repo(destination), "repo_type": destination.repo_type}
    revision = destination.revision
    if revision is not None and not revision.startswith("refs/") and not destination.create_pr:
        api.create_branch(**where, branch=revision, exist_ok=True)
    there = api.list_repo_files(**where, revision=revision)
    # New ones each time: the client looks what of them the repository has, and a commit whose answer was lost is not
    # made twice.
    operations: list[Any] = [CommitOperationAdd(one.path_in_repo, one.path_or_fileobj) for one in additions]
    sent = {one.path_in_repo for one in additions}
    operations += [CommitOperationDelete(name) for name in there if stale(name) and name not in sent]
    return api.create_commit(
        **where,
        operations=operations,
        commit_message=destination.commit_message or "Upload with hf_xmc",
        commit_description=destination.commit_description,
        revision=revision,
        create_pr=destination.create_pr,
    )


def _may_pass(error: HTTPError) -> bool:
    """Whether an error may be gone in a moment: no connection, a server in trouble, too many requests."""
    if not isinstance(error, HfHubHTTPError) or error.response is None:
        return True
    return error.response.status_code >= 500 or error.response.status_code in (408, 429)


@contextmanager
def _explained(source: str, repo_id: str) -> Iterator[None]:
    """Says what an error of the Hub means for the upload."""
    kept = f"{source} is as it was; call it again to go on: what has been sent is not sent twice."
    try:
        yield
    except RevisionNotFoundError as error:
        raise OSError(f"`{repo_id}` has no such revision to upload to: {error}") from error
    except RepositoryNotFoundError as error:
        raise OSError(
            f"`{repo_id}` cannot be written: it does not exist, or the token may not see it. Log in with `hf auth "
            f"login`, or pass `token`. {error}"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            raise OSError(
                f"The Hub refuses the upload to `{repo_id}` ({status}). Log in with `hf auth login`, or pass a "
                f"`token` with the right to write there. {error}"
            ) from error
        raise OSError(f"The upload to `{repo_id}` failed: {error} {kept}") from error
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise OSError(f"The Hub cannot be reached for the upload to `{repo_id}`: {error} {kept}") from error
