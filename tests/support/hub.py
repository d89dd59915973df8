"""A Hugging Face hub with one repository: of a dataset, a folder at one commit; or of a model, which takes uploads."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "5" * 40


class Hub(ThreadingHTTPServer):
    """Answers what `huggingface_hub` asks about the dataset `name`; records each request."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.folder = name, folder
        self.requests: list[tuple[str, str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Range", "")))
        repository = re.escape(self.server.name)
        if match := re.fullmatch(rf"/datasets/{repository}/resolve/[^/]+/(.+)", path):
            return self.send_file(self.server.folder / match[1])
        if re.fullmatch(rf"/api/datasets/{repository}(/revision/[^/]+)?", path):
            names = [self.relative(each) for each in self.server.files()]
            return self.send({"id": self.server.name, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]})
        if re.fullmatch(rf"/api/datasets/{repository}/paths-info/[^/]+", path):
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            entries = (self.entry(self.server.folder / each) for each in asked)
            return self.send([entry for entry in entries if entry])
        if match := re.fullmatch(rf"/api/datasets/{repository}/tree/[^/]+/?(.*)", path):
            return self.send_tree(self.server.folder / match[1], "recursive=true" in self.path.lower())
        return self.refuse("RepoNotFound", "Repository not found")

    def relative(self, path: Path) -> str:
        return path.relative_to(self.server.folder).as_posix()

    def entry(self, path: Path) -> dict[str, Any] | None:
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": self.relative(path)}
        if not path.is_file():
            return None
        return {"type": "file", "oid": "0" * 40, "size": path.stat().st_size, "path": self.relative(path)}

    def send_tree(self, folder: Path, recursive: bool) -> None:
        if not folder.is_dir():
            return self.refuse("EntryNotFound", "no such folder")
        return self.send([self.entry(path) for path in sorted(folder.rglob("*") if recursive else folder.iterdir())])

    def send_file(self, path: Path) -> None:
        if not path.is_file():
            return self.refuse("EntryNotFound", "Entry not found")
        data = path.read_bytes()
        size = len(data)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        extra = {"X-Repo-Commit": COMMIT, "ETag": f'"{size}"', "Accept-Ranges": "bytes"}
        if match:
            extra["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        return self.reply(206 if match else 200, data[begin:end], extra)

    def send(self, value: Any) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, code: str, message: str) -> None:
        self.reply(404, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class UploadHub(ThreadingHTTPServer):
    """Takes what `huggingface_hub` uploads into the repository `name` of a kind, by git and by LFS.

    `status` is its answer to a commit, if it is not 200; `exists` and `private` are those of the repository.
    `before_commit` runs before each commit is looked at: what others do meanwhile.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, name: str, kind: str = "model") -> None:
        super().__init__(("127.0.0.1", 0), UploadHandler)
        self.name, self.kind, self.status = name, kind, 200
        self.exists = self.private = False
        self.requests: list[tuple[str, str]] = []
        self.objects: dict[str, bytes] = {}
        self.branches: dict[str, dict[str, bytes]] = {"main": {}}
        self.commits = 0
        self.before_commit: Callable[[], object] = lambda: None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def head(self) -> str:
        """The newest commit, of all branches."""
        return f"{self.commits:040x}"

    def sent(self) -> list[str]:
        """The objects that were sent by LFS."""
        return [path for method, path in self.requests if method == "PUT"]


class UploadHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: UploadHub

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PUT(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        body = self.body()
        hub.requests.append((self.command, path))
        api, git = f"/api/{hub.kind}s/{hub.name}", f"{'' if hub.kind == 'model' else 'datasets/'}{hub.name}"
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.send({"errors": [], "warnings": []})
        if path in (api, f"{api}/revision/{self.branch}"):
            return self.send({"id": hub.name, "sha": hub.head, "private": hub.private, "siblings": []})
        if branch := self.after(path, f"{api}/branch/"):
            hub.branches.setdefault(branch, {})
            return self.send({})
        if self.after(path, f"{api}/tree/"):
            return self.send([self.entry(*each) for each in hub.branches[self.branch].items()])
        if self.after(path, f"{api}/preupload/"):
            return self.send({"files": [self.mode(file) for file in json.loads(body)["files"]]})
        if path == f"/{git}.git/info/lfs/objects/batch":
            return self.send(
                {"transfer": "basic", "objects": [self.upload(each) for each in json.loads(body)["objects"]]}
            )
        if oid := self.after(path, "/objects/"):
            hub.objects[oid] = body
            return self.send({})
        if branch := self.after(path, f"{api}/commit/"):
            return self.commit(branch, [json.loads(line) for line in body.splitlines()])
        return self.send({"error": f"Repository not found: {path}"}, 404)

    @property
    def branch(self) -> str:
        """The branch that was made last: the tests use one besides main."""
        return list(self.server.branches)[-1]

    def entry(self, path: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "oid": "0" * 40, "size": len(data), "path": path}

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def after(self, path: str, start: str) -> str:
        return path.removeprefix(start) if path.startswith(start) else ""

    def create(self, asked: dict[str, Any]) -> None:
        hub = self.server
        if hub.exists:
            return self.send({"error": "You already created this repo", "url": f"{hub.url}/{hub.name}"}, 409)
        hub.exists, hub.private = True, bool(asked.get("private")) or asked.get("visibility") == "private"
        return self.send({"url": f"{hub.url}/{hub.name}", "name": hub.name})

    def mode(self, file: dict[str, Any]) -> dict[str, Any]:
        how = "regular" if file["path"].endswith((".md", ".json", ".yaml")) else "lfs"
        return {"path": file["path"], "uploadMode": how, "shouldIgnore": False}

    def upload(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The address to send an object to; none if it is here."""
        if asked["oid"] in self.server.objects:
            return asked
        return {**asked, "actions": {"upload": {"href": f"{self.server.url}/objects/{asked['oid']}"}}}

    def commit(self, branch: str, lines: list[dict[str, Any]]) -> None:
        hub = self.server
        hub.before_commit()
        if hub.status != 200:
            return self.send({"error": f"no, {hub.status}"}, hub.status)
        files = dict(hub.branches[branch])
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit", hub.head) != hub.head:
                return self.send({"error": "A commit has happened since. Please refresh and try again."}, 412)
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        hub.branches[branch] = files
        hub.commits += 1
        return self.send({"commitUrl": f"{hub.url}/{hub.name}/commit/{hub.head}", "commitOid": hub.head})

    def send(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data))}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass
