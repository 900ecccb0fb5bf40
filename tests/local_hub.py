"""
A Hub for tests: repositories in memory, served over HTTP to the real client.

It answers the requests of `huggingface_hub` and `datasets` that create, fill, list and download repositories: commits
with LFS, branches, pull requests, private and gated repositories. `requests` lists them; `fail`, `cut` and `stall`
make some fail.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]
# Status, body and headers.
Answer = tuple[int, Any, dict[str, str]]

OWNER, TOKEN = "me", "hf_token_of_me"
LFS_SUFFIXES = (".safetensors", ".parquet", ".png", ".bin")
KINDS = {"models": "model", "datasets": "dataset"}


@dataclass
class Commit:
    files: Files
    title: str

    @property
    def sha(self) -> str:
        content = {path: hashlib.sha256(data).hexdigest() for path, data in sorted(self.files.items())}
        return hashlib.sha1(json.dumps([self.title, content]).encode()).hexdigest()


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    # Commits of each branch, the newest last; a pull request is the branch refs/pr/N.
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit({}, "initial commit")]})

    def commit(self, revision: str) -> Commit | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        every = (commit for commits in self.branches.values() for commit in commits)
        return next((commit for commit in every if commit.sha == revision), None)


class LocalHub:
    """The server, at the address `url`."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.tokens_seen: set[str | None] = set()
        self._failures: list[list] = []
        self._cuts: list[list] = []
        self._stalls: list[tuple[re.Pattern, float]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Returns the environment variables that connect `huggingface_hub` to this server."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def files(self, repo_id: str, revision: str = "main") -> Files:
        commit = self.repos[repo_id].commit(revision)
        assert commit is not None
        return commit.files

    def add(self, repo_id: str, folder: Path, **options: Any) -> Repo:
        """Adds a repository with the files of a folder."""
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
        repo = self.repos[repo_id] = Repo(**options)
        repo.branches["main"].append(Commit(files, "upload"))
        return repo

    def fail(self, pattern: str, status: int, times: int = 1, done: bool = False) -> None:
        """Answers the next requests that match `pattern` with an error; with `done`, after processing them."""
        self._failures.append([re.compile(pattern), status, times, done])

    def cut(self, pattern: str, times: int = 1) -> None:
        """Ends the connection in the middle of the next answers to requests that match `pattern`."""
        self._cuts.append([re.compile(pattern), times])

    def stall(self, pattern: str, seconds: float) -> None:
        """Waits so long before the next answer to a request that matches `pattern`."""
        self._stalls.append((re.compile(pattern), seconds))

    def wait(self, request: str) -> None:
        """Waits before an answer, if it is to be delayed."""
        with self._lock:
            found = [stall for stall in self._stalls if stall[0].search(request)][:1]
            self._stalls = [stall for stall in self._stalls if stall not in found]
        for _, seconds in found:
            time.sleep(seconds)

    def is_cut(self, request: str) -> bool:
        """Whether the answer to this request is to be cut."""
        with self._lock:
            for cut in self._cuts:
                if cut[1] and cut[0].search(request):
                    cut[1] -= 1
                    return True
        return False

    def heal(self) -> None:
        """Ends all failures."""
        self._failures, self._cuts, self._stalls = [], [], []

    @contextmanager
    def watched(self) -> Iterator[list[str]]:
        """Yields a list that contains the requests of the block when it ends."""
        start = len(self.requests)
        seen: list[str] = []
        yield seen
        seen += self.requests[start:]

    def answer(self, method: str, path: str, body: bytes, headers: Any) -> Answer:
        with self._lock:
            request = f"{method} {path}"
            self.requests.append(request)
            failed: Answer | None = None
            for failure in self._failures:
                pattern, status, times, done = failure
                if times and pattern.search(request):
                    failure[2] -= 1
                    failed = status, {"error": "out of order"}, {}
                    if not done:
                        return failed
                    break
            token = (headers.get("Authorization") or "").removeprefix("Bearer ") or None
            self.tokens_seen.add(token)
            for pattern, route in ROUTES:
                if found := pattern.fullmatch(path):
                    answer = route(self, found, body, _Request(method, token, headers))
                    return failed or answer
            return 404, {"error": f"no route for {request}"}, {}


@dataclass
class _Request:
    method: str
    token: str | None
    headers: Any


def _whoami(hub: LocalHub, found: re.Match, body: bytes, request: _Request) -> Answer:
    if request.token != TOKEN:
        return 401, {"error": "Invalid user token."}, {}
    return 200, {"name": OWNER, "type": "user", "orgs": [], "auth": {}}, {}


def _validate(hub: LocalHub, found: re.Match, body: bytes, request: _Request) -> Answer:
    return 200, {"errors": [], "warnings": []}, {}


def _create(hub: LocalHub, found: re.Match, body: bytes, request: _Request) -> Answer:
    wanted = json.loads(body)
    if request.token != TOKEN:
        return 401, {"error": "Invalid username or password."}, {}
    repo_id = f"{wanted.get('organization') or OWNER}/{wanted['name']}"
    key = f"datasets/{repo_id}" if wanted.get("type") == "dataset" else repo_id
    url = f"{hub.url}/{key}"
    if key in hub.repos:
        return 409, {"error": "You already created this repo", "url": url}, {}
    hub.repos[key] = Repo(private=wanted.get("private") or wanted.get("visibility") == "private")
    return 200, {"url": url, "id": repo_id, "name": repo_id}, {}


def _upload_lfs(hub: LocalHub, found: re.Match, body: bytes, request: _Request) -> Answer:
    if hashlib.sha256(body).hexdigest() != found["oid"]:
        return 400, {"error": "the content is not what was announced"}, {}
    hub.blobs[found["oid"]] = body
    return 200, {}, {}


def _of_repo(route: Any, writes: bool = False) -> Any:
    """Wraps a route that requires a repository and read (or write) access to it."""

    def checked(hub: LocalHub, found: re.Match, body: bytes, request: _Request) -> Answer:
        kind = (found.groupdict().get("kind") or "").strip("/")
        key = f"datasets/{found['repo']}" if kind.startswith("dataset") else found["repo"]
        repo = hub.repos.get(key)
        if repo is None or (repo.private and request.token != TOKEN):
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if repo.gated and request.token != TOKEN:
            text = f"Access to model {key} is restricted. You must be authenticated to access it."
            status = 401 if request.token is None else 403
            return status, {"error": text}, {"X-Error-Code": "GatedRepo", "X-Error-Message": text}
        if writes and request.token != TOKEN:
            return 403, {"error": "You don't have the rights to write here"}, {"X-Error-Message": "no right to write"}
        return route(hub, repo, found, body, request)

    return checked


def _no_revision(revision: str) -> Answer:
    return 404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"}


def _preupload(hub: LocalHub, repo: Repo, found: re.Match, body: bytes, request: _Request) -> Answer:
    commit = repo.commit(found["revision"])
    if commit is None:
        return _no_revision(found["revision"])
    files = []
    for file in json.loads(body)["files"]:
        lfs = file["path"].endswith(LFS_SUFFIXES)
        known = commit.files.get(file["path"])
        oid = None if known is None else _oid(known, lfs)
        files.append(
            {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}
        )
    return 200, {"files": files}, {}


def _oid(data: bytes, lfs: bool) -> str:
    """Returns the SHA-256 of an LFS file, or the git hash of any other file."""
    return hashlib.sha256(data).hexdigest() if lfs else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _lfs_batch(hub: LocalHub, repo: Repo, found: re.Match, body: bytes, request: _Request) -> Answer:
    objects = []
    for wanted in json.loads(body)["objects"]:
        entry = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] not in hub.blobs:
            entry["actions"] = {"upload": {"href": f"{hub.url}/lfs/{wanted['oid']}"}}
        objects.append(entry)
    return 200, {"transfer": "basic", "objects": objects}, {}


def _commit(hub: LocalHub, repo: Repo, found: re.Match, body: bytes, request: _Request) -> Answer:
    revision, pull_request = found["revision"], None
    if revision not in repo.branches:
        return _no_revision(revision)
    files, title = dict(repo.branches[revision][-1].files), ""
    for line in body.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "header":
            title = value["summary"]
        elif entry["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif entry["key"] == "lfsFile":
            files[value["path"]] = hub.blobs[value["oid"]]
        elif entry["key"] == "deletedFile":
            del files[value["path"]]
    commit = Commit(files, title)
    if found["query"] and "create_pr=1" in found["query"]:
        number = sum(name.startswith("refs/pr/") for name in repo.branches) + 1
        revision = f"refs/pr/{number}"
        repo.branches[revision] = [*repo.branches["main"]]
        pull_request = f"{hub.url}/{found['repo']}/discussions/{number}"
    repo.branches[revision].append(commit)
    answer = {"commitUrl": f"{hub.url}/{found['repo']}/commit/{commit.sha}", "commitOid": commit.sha}
    return 200, {**answer, "pullRequestUrl": pull_request}, {}


def _branch(hub: LocalHub, repo: Repo, found: re.Match, body: bytes, request: _Request) -> Answer:
    if found["revision"] in repo.branches:
        return 409, {"error": "Reference already exists"}, {}
    start = json.loads(body or b"{}").get("startingPoint") or "main"
    repo.branches[found["revision"]] = [*repo.branches[start]]
    return 200, {}, {}


def _entry(path: str, data: bytes) -> dict[str, Any]:
    lfs = path.endswith(LFS_SUFFIXES)
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _oid(data, False)}
    if lfs:
        entry["lfs"] = {"oid": _oid(data, True), "size": len(data), "pointerSize": 134}
    return entry


def _tree(hub: LocalHub, repo: Repo, found: re.Match, body: bytes, request: _Request) -> Answer:
    commit = repo.commit(found["revision"])
    if commit is None:
        return _no_revision(found["revision"])
    folder = (found["path"] or "").strip("/")
    inside = {path: data for path, data in commit.files.items() if path.startswith(f"{folder}/" if folder else "")}
    if folder and not inside:
        return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"}
    depth = len(PurePosixPath(folder).parts) + 1
    parents = {parent.as_posix() for path in inside for parent in PurePosixPath(path).parents}
    entries = [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(parents - {"."})]
    entries += [_entry(path, data) for path, data in inside.items()]
    if "recursive=true" not in (found["query"] or "").lower():
        entries = [entry for entry in entries if len(PurePosixPath(entry["path"]).parts) == depth]
    return 200, [entry for entry in entries if len(PurePosixPath(entry["path"]).parts) >= depth], {}


def _info(hub: LocalHub, repo: Repo, found: re.Match, body: bytes, request: _Request) -> Answer:
    commit = repo.commit(found["revision"] or "main")
    if commit is None:
        return _no_revision(found["revision"])
    card = commit.files.get("README.md", b"").decode()
    tag = re.search(r"^pipeline_tag: (.+)$", card, re.M)
    library = re.search(r"^library_name: (.+)$", card, re.M)
    info = {
        "id": found["repo"],
        "modelId": found["repo"],
        "sha": commit.sha,
        "private": repo.private,
        "gated": "manual" if repo.gated else False,
        "siblings": [{"rfilename": path} for path in commit.files],
        "tags": [],
        "pipeline_tag": tag and tag[1],
        "library_name": library[1] if library else "transformers",
        "downloads": 0,
        "likes": 0,
    }
    return 200, info, {"X-Repo-Commit": commit.sha}


def _resolve(hub: LocalHub, repo: Repo, found: re.Match, body: bytes, request: _Request) -> Answer:
    commit = repo.commit(found["revision"])
    if commit is None:
        return _no_revision(found["revision"])
    headers = {"X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
    data = commit.files.get(found["path"])
    if data is None:
        return 404, {"error": "Entry not found"}, {**headers, "X-Error-Code": "EntryNotFound"}
    headers["ETag"] = f'"{_oid(data, found["path"].endswith(LFS_SUFFIXES))}"'
    if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
        first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
        return 206, data[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"}
    return 200, data, headers


_KIND = r"(?P<kind>models|datasets)"
_REPO = r"(?P<repo>[^/]+/[^/]+?)"
_REVISION = r"(?P<revision>refs/pr/\d+|[^/?]+)"
ROUTES = [
    (re.compile(pattern), route)
    for pattern, route in (
        (r"/api/whoami-v2", _whoami),
        (r"/api/validate-yaml", _validate),
        (r"/api/repos/create", _create),
        (r"/lfs/(?P<oid>[0-9a-f]{64})", _upload_lfs),
        (rf"/(?P<kind>datasets/)?{_REPO}\.git/info/lfs/objects/batch", _of_repo(_lfs_batch, writes=True)),
        (rf"/api/{_KIND}/{_REPO}/preupload/{_REVISION}(\?.*)?", _of_repo(_preupload, writes=True)),
        (rf"/api/{_KIND}/{_REPO}/commit/{_REVISION}(?P<query>\?.*)?", _of_repo(_commit, writes=True)),
        (rf"/api/{_KIND}/{_REPO}/branch/{_REVISION}", _of_repo(_branch, writes=True)),
        (rf"/api/{_KIND}/{_REPO}/tree/{_REVISION}(?P<path>/[^?]*)?(?P<query>\?.*)?", _of_repo(_tree)),
        (rf"/api/{_KIND}/{_REPO}(/revision/{_REVISION})?(\?.*)?", _of_repo(_info)),
        (rf"(/api/resolve-cache)?/(?P<kind>models/|datasets/)?{_REPO}/resolve/{_REVISION}/(?P<path>[^?]+)(\?.*)?",
         _of_repo(_resolve)),
    )
]  # fmt: skip


def _handler(hub: LocalHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            """Prints nothing."""

        def do_GET(self) -> None:
            split = urlsplit(self.path)
            path = unquote(split.path) + (f"?{split.query}" if split.query else "")
            hub.wait(f"{self.command} {path}")
            status, content, headers = hub.answer(self.command, path, self._body(), self.headers)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                if hub.is_cut(f"{self.command} {path}"):
                    data, self.close_connection = data[: len(data) // 2], True
                self.wfile.write(data)

        do_POST = do_PUT = do_HEAD = do_DELETE = do_GET

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

    return Handler
