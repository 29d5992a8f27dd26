"""A Hub on loopback: the endpoints that the real client uses to push and pull models, and faults.

Written from what the client sends: repositories with branches and commits, LFS storage, the commit
endpoint's JSON lines. A fault is used up by the request it meets.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_StandInSecretToken"
LFS_ENDINGS = (".safetensors", ".npz", ".png")


@dataclass
class Fault:
    """What befalls the first request whose "METHOD path" holds `where`.

    status     answered instead, with `headers` and `message`
    after      the connection drops after so many bytes of the body, sent or received
    lost       the request is served, but its answer is never sent
    """

    where: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""
    after: int | None = None
    lost: bool = False


@dataclass
class Repository:
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        text = json.dumps([branch, len(self.commits), sorted(files)])
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class StandInHub:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.storage: dict[str, bytes] = {}  # large files by digest
        self.faults: list[Fault] = []
        self.requests: list[str] = []  # "METHOD path", as they came
        self.received = 0  # bytes of large files
        self.resumed: list[int] = []  # where downloads went on
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def add(self, name: str, files: dict[str, bytes], private: bool = False) -> Repository:
        repository = Repository(private)
        repository.commit("main", {".gitattributes": b"", **files})
        self.repositories[name] = repository
        return repository

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        repository = self.repositories[name]
        return repository.commits[repository.branches[branch]]

    def count(self, where: str) -> int:
        return sum(where in request for request in self.requests)


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _is_large(path: str) -> bool:
    return path.endswith(LFS_ENDINGS)


def _oid(path: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if _is_large(path) else _git_oid(content)


class _Drop(Exception):
    pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: StandInHub
    fault: Fault | None

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        request = f"{self.command} {path}"
        self.hub.requests.append(request)
        self.fault = next((one for one in self.hub.faults if one.where in request), None)
        if self.fault is not None:
            self.hub.faults.remove(self.fault)
        try:
            body = self._body()
            if self.fault is not None and self.fault.status is not None:
                headers = {"X-Error-Message": self.fault.message, **self.fault.headers}
                self._answer(self.fault.status, {"error": self.fault.message}, headers)
            else:
                self._route(path, body)
        except _Drop:
            self.close_connection = True

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        fault = self.fault
        if fault is not None and fault.after is not None and self.command in ("PUT", "POST"):
            self.rfile.read(min(fault.after, length))
            raise _Drop
        return self.rfile.read(length)

    def _route(self, path: str, body: bytes) -> None:
        routes = (
            (r"POST /api/repos/create", self._create),
            (r"POST /api/validate-yaml", lambda _: self._answer(200, {"warnings": []})),
            (r"GET /api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", self._info),
            (r"GET /api/models/([^/]+/[^/]+)/tree/(.+)", self._tree),
            (r"POST /api/models/([^/]+/[^/]+)/branch/(.+)", self._branch),
            (r"POST /api/models/([^/]+/[^/]+)/preupload/(.+)", self._preupload),
            (r"POST /api/models/([^/]+/[^/]+)/commit/(.+)", self._commit),
            (r"POST /([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._lfs_batch),
            (r"PUT /storage/(\w+)", self._store),
            (r"POST /storage/verify", self._verify_stored),
            (r"(?:GET|HEAD) /([^/]+/[^/]+)/resolve/(.+)/([^/]+)", self._resolve),
        )
        for pattern, serve in routes:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                serve(body, *match.groups())
                return
        self._answer(501, {"error": f"not in this stand-in: {self.command} {path}"})

    # --- who may do what

    def _may_write(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        # As careless servers do, the answer repeats what came: nothing of it may reach a screen.
        said = f"Invalid credentials in Authorization header: {self.headers.get('Authorization')}"
        self._answer(401, {"error": said})
        return False

    def _repository(self, name: str) -> Repository | None:
        found = self.hub.repositories.get(name)
        hidden = found is not None and found.private
        if found is None or (hidden and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self._answer(404, {"error": "Repository not found"}, headers)
            return None
        return found

    def _at(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repository = self._repository(name)
        if repository is None:
            return None
        sha = repository.at(revision)
        if sha is None:
            headers = {"X-Error-Code": "RevisionNotFound"}
            self._answer(404, {"error": f"Invalid rev id: {revision}"}, headers)
            return None
        return sha, repository.commits[sha]

    # --- repositories

    def _create(self, body: bytes) -> None:
        if not self._may_write():
            return
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repositories:
            self._answer(409, {"error": "You already created this model repo", "url": url})
            return
        self.hub.add(name, {}, asked.get("visibility") == "private")
        self._answer(200, {"url": url, "name": name})

    def _info(self, _: bytes, name: str, revision: str | None) -> None:
        if (found := self._at(name, revision or "main")) is None:
            return
        sha, files = found
        self._answer(200, {
            "id": name, "sha": sha, "private": self.hub.repositories[name].private, "tags": [],
            "siblings": [
                {"rfilename": path, "size": len(content), "blobId": _git_oid(content),
                 **({"lfs": {"sha256": _oid(path, content), "size": len(content),
                             "pointerSize": 100}} if _is_large(path) else {})}
                for path, content in files.items()],
        })  # fmt: skip

    def _tree(self, _: bytes, name: str, revision: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository and repository.at(revision) is None and repository.at(revision.split("/")[0]):
            self._answer(404, {"error": "no such folder"}, {"X-Error-Code": "EntryNotFound"})
            return
        if (found := self._at(name, revision)) is None:
            return
        self._answer(200, [
            {"type": "file", "path": path, "size": len(content), "oid": _git_oid(content),
             **({"lfs": {"oid": _oid(path, content), "size": len(content), "pointerSize": 100}}
                if _is_large(path) else {})}
            for path, content in found[1].items()])  # fmt: skip

    def _branch(self, _: bytes, name: str, branch: str) -> None:
        if not self._may_write() or (repository := self._repository(name)) is None:
            return
        repository.branches.setdefault(branch, repository.branches["main"])
        self._answer(200, {})

    # --- uploads

    def _preupload(self, body: bytes, name: str, revision: str) -> None:
        if not self._may_write() or (found := self._at(name, revision)) is None:
            return
        files = []
        for one in json.loads(body)["files"]:
            path, there = one["path"], found[1].get(one["path"])
            files.append({
                "path": path, "shouldIgnore": False,
                "uploadMode": "lfs" if _is_large(path) else "regular",
                **({} if there is None else {"oid": _oid(path, there)}),
            })  # fmt: skip
        self._answer(200, {"files": files})

    def _lfs_batch(self, body: bytes, name: str) -> None:
        if not self._may_write():
            return
        objects = []
        for one in json.loads(body)["objects"]:
            actions = {} if one["oid"] in self.hub.storage else {"actions": {
                "upload": {"href": f"{self.hub.url}/storage/{one['oid']}"},
                "verify": {"href": f"{self.hub.url}/storage/verify"},
            }}  # fmt: skip
            objects.append({"oid": one["oid"], "size": one["size"], **actions})
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _store(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer(400, {"error": "not the digest"})
            return
        self.hub.storage[oid] = body
        self.hub.received += len(body)
        self._answer(200, {})

    def _verify_stored(self, body: bytes) -> None:
        asked = json.loads(body)
        whole = len(self.hub.storage.get(asked["oid"], b"")) == asked["size"]
        self._answer(200 if whole else 404, {})

    def _commit(self, body: bytes, name: str, branch: str) -> None:
        if not self._may_write() or (found := self._at(name, branch)) is None:
            return
        files = dict(found[1])
        for line in body.splitlines():
            record = json.loads(line)
            value: dict[str, Any] = record["value"]
            if record["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif record["key"] == "lfsFile":
                files[value["path"]] = self.hub.storage[value["oid"]]
            elif record["key"] == "deletedFile":
                if value["path"] not in files:
                    self._answer(404, {"error": "A file with this name doesn't exist"},
                                 {"X-Error-Code": "EntryNotFound"})  # fmt: skip
                    return
                del files[value["path"]]
        sha = self.hub.repositories[name].commit(branch, files)
        self._answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha})

    # --- downloads

    def _resolve(self, _: bytes, name: str, revision: str, path: str) -> None:
        if (found := self._at(name, revision)) is None:
            return
        sha, files = found
        if path not in files:
            self._answer(404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
            return
        content = files[path]
        headers = {"ETag": f'"{_oid(path, content)}"', "X-Repo-Commit": sha}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked is None:
            self._send(200, content, headers)
            return
        start = int(asked[1])
        self.hub.resumed.append(start)
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206, content[start:], headers)

    # --- answers

    def _answer(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        said = {"Content-Type": "application/json", **(headers or {})}
        self._send(status, json.dumps(value).encode(), said)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        if self.fault is not None and self.fault.lost:
            raise _Drop
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is not None and self.fault.after is not None:
            self.wfile.write(content[: self.fault.after])
            self.wfile.flush()
            raise _Drop
        self.wfile.write(content)
