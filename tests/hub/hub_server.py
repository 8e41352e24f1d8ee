"""A small server that speaks the Hugging Face Hub's documented HTTP protocol, as far as huggingface_hub uses it.

https://huggingface.co/docs/hub/api and https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md: who am I, create,
preupload, LFS batch and upload, commit (NDJSON), tags, refs, tree, revision, resolve; models and datasets; bearer tokens.
With `xet` it also offers Xet as the Hub does: tokens, and files that name their hash; its storage refuses every request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "abcdefghij" * 4
READ_ONLY = "hf_" + "readonly" * 5


@dataclass
class Repository:
    """files: path -> content per commit, oldest first; tags: name -> commit."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    def resolve(self, revision: str) -> str | None:
        if revision == "main":
            return self.head
        return self.tags.get(revision, revision if revision in self.commits else None)


class HubServer(ThreadingHTTPServer):
    """Use as a context manager; `url` goes into HF_ENDPOINT.

    Attributes:
        repositories: by kind and id. objects: LFS store by sha256. log: every request as "METHOD path".
        break_after: LFS uploads that still succeed; later ones lose their connection halfway. Negative: none break.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.log: list[str] = []
        self.break_after = -1
        self.xet = False
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    # -- plumbing -----------------------------------------------------------------------------------------------

    def _send(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        self.send_response(status)
        sent = {"Content-Length": str(len(data)), **(headers or {})}
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _fail(self, status: int, code: str, message: str) -> None:
        self._send(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    @property
    def _user(self) -> str | None:
        word = (self.headers.get("Authorization") or "").removeprefix("Bearer ").strip()
        return {TOKEN: "writer", READ_ONLY: "reader"}.get(word)

    def _route(self) -> None:
        self.server.log.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        for pattern, handler in _ROUTES:
            if found := re.fullmatch(pattern, path):
                with self.server.lock:
                    handler(self, **{k: v for k, v in found.groupdict().items() if v is not None})
                return
        self._body()
        self._fail(404, "EntryNotFound", f"no such route: {path}")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _route

    def _repository(self, kind: str, repo: str) -> Repository | None:
        found = self.server.repositories.get((kind, repo))
        if found is None or (found.private and self._user is None):
            self._fail(401 if self._user is None else 404, "RepoNotFound", "Repository not found")
            return None
        return found

    def _may_write(self) -> bool:
        if self._user is None:
            self._fail(401, "", "Invalid username or password.")
        elif self._user != "writer":
            self._fail(403, "", "You don't have the rights to write here")
        return self._user == "writer"

    # -- the protocol -------------------------------------------------------------------------------------------

    def whoami(self) -> None:
        if self._user is None:
            self._fail(401, "", "Invalid username or password.")
        else:
            self._send(
                200,
                {
                    "name": self._user,
                    "type": "user",
                    "auth": {"accessToken": {"role": "write"}},
                    "orgs": [],
                },
            )

    def create(self) -> None:
        body = json.loads(self._body())
        if not self._may_write():
            return
        repo = f"{body.get('organization') or 'writer'}/{body['name']}"
        key = (body.get("type", "model") + "s", repo)
        if key in self.server.repositories:
            self._send(
                409, {"url": f"{self.server.url}/{repo}", "error": "You already created this repo"}
            )
            return
        first = {
            hashlib.sha1(repo.encode()).hexdigest(): {
                ".gitattributes": b"*.safetensors filter=lfs\n"
            }
        }
        self.server.repositories[key] = Repository(
            bool(body.get("private")) or body.get("visibility") == "private", first
        )
        self._send(200, {"url": f"{self.server.url}/{repo}", "name": repo})

    def xet_token(self, kind: str, repo: str, revision: str) -> None:
        headers = {
            "X-Xet-Cas-Url": f"{self.server.url}/cas",
            "X-Xet-Access-Token": "t",
            "X-Xet-Token-Expiration": "4102444800",
        }
        self._send(
            200,
            {"casUrl": headers["X-Xet-Cas-Url"], "accessToken": "t", "exp": 4102444800},
            headers,
        )

    def xet_storage(self) -> None:
        self._body()
        self._fail(403, "", "storage refuses")

    def heal(self) -> None:
        """No part of the protocol: tests end the breaking of uploads by it."""
        self.server.break_after = -1
        self._send(200, {})

    def validate_yaml(self) -> None:
        self._body()
        self._send(200, {"errors": [], "warnings": []})

    def preupload(self, kind: str, repo: str, revision: str) -> None:
        files = json.loads(self._body())["files"]
        found = self._repository(kind, repo)
        if found is None or not self._may_write():
            return
        kept = found.commits[found.head]
        answer = []
        for path in (file["path"] for file in files):
            large = path.endswith((".safetensors", ".png", ".gguf"))
            name = (
                hashlib.sha256(kept.get(path, b"")).hexdigest()
                if large
                else _git_oid(kept.get(path, b""))
            )
            mode = {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            answer.append({"path": path, **mode, "oid": name if path in kept else None})
        self._send(200, {"files": answer})

    def batch(self, repo: str, kind: str = "") -> None:
        asked = json.loads(self._body())
        if not self._may_write():
            return
        answer = []
        for item in asked["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.server.objects:
                entry["actions"] = {
                    "upload": {"href": f"{self.server.url}/lfs/{item['oid']}", "header": {}}
                }
            answer.append(entry)
        self._send(200, {"transfer": "basic", "objects": answer})

    def store(self, oid: str) -> None:
        if self.server.break_after == 0:
            self.rfile.read(1000)
            self.close_connection = True
            self.connection.close()
            return
        self.server.break_after -= 1
        content = self._body()
        if hashlib.sha256(content).hexdigest() != oid:
            self._fail(422, "", "sha256 does not match")
            return
        self.server.objects[oid] = content
        self._send(200, {})

    def commit(self, kind: str, repo: str, revision: str) -> None:
        lines = [json.loads(line) for line in self._body().splitlines() if line.strip()]
        found = self._repository(kind, repo)
        if found is None or not self._may_write():
            return
        files = dict(found.commits[found.head])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] != "header":
                raise AssertionError(f"nothing but additions is expected, not {line['key']}")
        oid = hashlib.sha1(
            repr(sorted(files.items())).encode() + str(len(found.commits)).encode()
        ).hexdigest()
        found.commits[oid] = files
        self._send(200, {"commitOid": oid, "commitUrl": f"{self.server.url}/{repo}/commit/{oid}"})

    def tag(self, kind: str, repo: str, revision: str) -> None:
        name = json.loads(self._body())["tag"]
        found = self._repository(kind, repo)
        if found is None or not self._may_write():
            return
        if name in found.tags:
            self._fail(409, "", "tag exists")
            return
        found.tags[name] = found.resolve(revision) or revision
        self._send(200, {})

    def refs(self, kind: str, repo: str) -> None:
        if found := self._repository(kind, repo):
            tags = [
                {"name": n, "ref": f"refs/tags/{n}", "targetCommit": c}
                for n, c in found.tags.items()
            ]
            branches = [{"name": "main", "ref": "refs/heads/main", "targetCommit": found.head}]
            self._send(200, {"branches": branches, "tags": tags, "converts": []})

    def info(self, kind: str, repo: str, revision: str = "main") -> None:
        if (found := self._repository(kind, repo)) and (oid := self._revision(found, revision)):
            siblings = [{"rfilename": path} for path in found.commits[oid]]
            self._send(
                200,
                {
                    "id": repo,
                    "sha": oid,
                    "siblings": siblings,
                    "private": found.private,
                    "tags": [],
                },
            )

    def tree(self, kind: str, repo: str, revision: str, folder: str = "") -> None:
        if (found := self._repository(kind, repo)) and (oid := self._revision(found, revision)):
            entries = [
                {"type": "file", "path": path, "size": len(content), "oid": _git_oid(content)}
                for path, content in found.commits[oid].items()
            ]
            self._send(200, entries)

    def resolve(self, repo: str, revision: str, path: str, kind: str = "models") -> None:
        if (found := self._repository(kind, repo)) and (oid := self._revision(found, revision)):
            content = found.commits[oid].get(path)
            if content is None:
                self._fail(404, "EntryNotFound", "Entry not found")
                return
            digest = hashlib.sha256(content).hexdigest()
            headers = {"ETag": f'"{digest}"', "X-Repo-Commit": oid, "Accept-Ranges": "none"}
            if self.server.xet and path.endswith(".safetensors"):
                token = f"{self.server.url}/api/{kind}/{repo}/xet-read-token/{oid}"
                headers |= {"X-Xet-Hash": digest, "X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content)),
                            "X-Xet-Refresh-Route": token}  # fmt: skip
            self._send(200, content, headers)

    def _revision(self, found: Repository, revision: str) -> str | None:
        oid = found.resolve(revision)
        if oid is None:
            self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return oid


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_API = r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)"
_ROUTES = [
    (r"/heal", _Handler.heal),
    (r"/api/whoami-v2", _Handler.whoami),
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", _Handler.validate_yaml),
    (_API + r"/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    (_API + r"/commit/(?P<revision>[^/]+)", _Handler.commit),
    (_API + r"/tag/(?P<revision>[^/]+)", _Handler.tag),
    (_API + r"/refs", _Handler.refs),
    (_API + r"/xet-(?:read|write)-token/(?P<revision>[^/]+)", _Handler.xet_token),
    (r"/cas/.*", _Handler.xet_storage),
    (_API + r"/revision/(?P<revision>[^/]+)", _Handler.info),
    (_API + r"/tree/(?P<revision>[^/]+)(?:/(?P<folder>.*))?", _Handler.tree),
    (_API, _Handler.info),
    (r"/(?:(?P<kind>datasets)/)?(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler.batch),
    (r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.store),
    (
        r"/(?:(?P<kind>datasets)/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
        _Handler.resolve,
    ),
]
