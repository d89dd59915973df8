"""A Hugging Face hub with one dataset that takes commits: in memory, every commit with its parent."""

from __future__ import annotations

import base64
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import unquote, urlsplit


class DatasetHub(ThreadingHTTPServer):
    """Answers what `huggingface_hub` asks about the dataset `name`; `commits` are its versions, the newest last."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.lock = name, Lock()
        self.commits: list[dict[str, bytes]] = [{}]
        self.objects: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def head(self) -> str:
        return f"{len(self.commits) - 1:040x}"

    def at(self, revision: str) -> dict[str, bytes]:
        """The files of a commit, or of the branch."""
        return self.commits[-1 if revision == "main" else int(revision, 16)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: DatasetHub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PUT(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        api, name = f"/api/datasets/{hub.name}", re.escape(hub.name)
        if path == "/" or path == f"{api}/auth-check/write":
            return self.send({})
        if re.fullmatch(rf"{re.escape(api)}(/revision/[^/]+)?", path):
            return self.send({"id": hub.name, "sha": hub.head, "siblings": []})
        if match := re.fullmatch(rf"{re.escape(api)}/tree/([^/]+)/?(.*)", path):
            return self.send_tree(hub.at(match[1]), match[2])
        if match := re.fullmatch(rf"{re.escape(api)}/paths-info/([^/]+)", path):
            asked, files = json.loads(body)["paths"], hub.at(match[1])
            return self.send([self.entry(files, each) for each in asked if each in files])
        if match := re.fullmatch(rf"/datasets/{name}/resolve/([^/]+)/(.+)", path):
            return self.send_file(hub.at(match[1]), match[2])
        if path.startswith(f"{api}/preupload/"):
            modes = {True: "lfs", False: "regular"}
            files = json.loads(body)["files"]
            return self.send(
                {
                    "files": [
                        {"path": f["path"], "uploadMode": modes[f["path"].endswith(".tar")], "shouldIgnore": False}
                        for f in files
                    ]
                }
            )
        if path == f"/datasets/{hub.name}.git/info/lfs/objects/batch":
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.url}/objects/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self.send({"transfer": "basic", "objects": objects})
        if path.startswith("/objects/"):
            hub.objects[path.removeprefix("/objects/")] = body or self.chunks()
            return self.send({})
        if path.startswith(f"{api}/commit/"):
            return self.commit([json.loads(line) for line in body.splitlines()])
        return self.refuse("RepoNotFound", f"not found: {path}")

    def chunks(self) -> bytes:
        data = b""
        while "chunked" in self.headers.get("Transfer-Encoding", "") and (size := int(self.rfile.readline(), 16)):
            data += self.rfile.read(size)
            self.rfile.readline()
        return data

    def commit(self, lines: list[dict[str, Any]]) -> None:
        hub = self.server
        with hub.lock:
            files = dict(hub.commits[-1])
            for key, value in ((line["key"], line["value"]) for line in lines):
                if key == "header" and value.get("parentCommit") not in (None, hub.head):
                    return self.send({"error": "a commit has happened since"}, 412)
                if key == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif key == "lfsFile":
                    files[value["path"]] = hub.objects[value["oid"]]
                elif key == "deletedFile":
                    del files[value["path"]]
            hub.commits.append(files)
        return self.send({"commitUrl": f"{hub.url}/datasets/{hub.name}/commit/{hub.head}", "commitOid": hub.head})

    def entry(self, files: dict[str, bytes], path: str) -> dict[str, Any]:
        date = {"id": self.server.head, "title": "a commit", "date": "2020-01-01T00:00:00.000Z"}
        oid = f"{hash(files[path]) & (1 << 159) - 1:040x}"
        return {"type": "file", "oid": oid, "size": len(files[path]), "path": path, "lastCommit": date}

    def send_tree(self, files: dict[str, bytes], folder: str) -> None:
        names = [path for path in sorted(files) if path.startswith(f"{folder}/" if folder else "")]
        if not names and folder:
            return self.refuse("EntryNotFound", "no such folder")
        return self.send([self.entry(files, path) for path in names])

    def send_file(self, files: dict[str, bytes], path: str) -> None:
        if path not in files:
            return self.refuse("EntryNotFound", "Entry not found")
        data = files[path]
        size, match = len(data), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        if match and begin >= size:
            return self.reply(416, b"", {"Content-Range": f"bytes */{size}"})
        extra = {"X-Repo-Commit": self.server.head, "ETag": f'"{size}"', "Accept-Ranges": "bytes"}
        extra |= {"Content-Range": f"bytes {begin}-{end - 1}/{size}"} if match else {}
        return self.reply(206 if match else 200, data[begin:end], extra)

    def send(self, value: Any, status: int = 200) -> None:
        self.reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

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
