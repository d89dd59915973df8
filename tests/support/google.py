"""A server of Google Cloud Storage: one bucket in memory, with generations, conditions and resumable uploads."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Google(ThreadingHTTPServer):
    """Answers what gcsfs asks; `objects` has content and generation by name."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, tuple[bytes, int, str]] = {}
        self.uploads: dict[str, tuple[str, bytearray]] = {}
        self.numbers, self.lock = count(1), Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Google

    def do_GET(self) -> None:
        name, asked = self.asked()
        if name is None:
            return self.send_list(asked)
        if name not in self.server.objects:
            return self.send({}, 404)
        data, generation, _ = self.server.objects[name]
        if asked.get("alt") != "media" and "/download/" not in self.path:
            return self.send(self.described(name))
        status, headers = 200, {"X-Goog-Generation": str(generation)}
        if wanted := self.headers.get("Range"):
            begin, end = wanted.removeprefix("bytes=").split("-")
            data, status = data[int(begin) : int(end or len(data)) + 1], 206
        return self.reply(status, data, headers)

    def do_POST(self) -> None:
        name, asked = self.asked()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "rewriteTo" in self.path:
            source, target = (unquote(part.split("/o/")[1]) for part in urlsplit(self.path).path.split("/rewriteTo"))
            self.server.objects[target] = self.server.objects[source]
            return self.send({"done": True})
        kind = asked.get("uploadType")
        if kind == "media":
            return self.store(asked["name"], body, asked.get("ifGenerationMatch"))
        if kind == "multipart":
            head, content = body.split(b"\n\n", 2)[1:]
            return self.store(json.loads(head.split(b"\n--")[0])["name"], content.removesuffix(b"\n--==0==--"), None)
        if kind == "resumable":
            upload = str(next(self.server.numbers))
            self.server.uploads[upload] = asked["name"], bytearray()
            location = f"{self.server.url}/upload/session/{upload}?of=resumable"
            return self.reply(200, b"", {"Location": location})
        name, data = self.server.uploads[urlsplit(self.path).path.rpartition("/")[2]]
        data += body
        if len(data) < int(self.headers["Content-Range"].rpartition("/")[2]):
            return self.reply(308, b"", {"Range": f"bytes=0-{len(data) - 1}"})
        return self.store(name, bytes(data), None)

    def do_DELETE(self) -> None:
        name, _ = self.asked()
        with self.server.lock:
            return self.send({}, 204 if self.server.objects.pop(name or "", None) else 404)

    def asked(self) -> tuple[str | None, dict[str, str]]:
        """The object and the query of a request."""
        parts = urlsplit(self.path)
        _, _, name = parts.path.partition("/o/")
        return unquote(name) or None, {key: values[0] for key, values in parse_qs(parts.query).items()}

    def store(self, name: str, data: bytes, condition: str | None) -> None:
        with self.server.lock:
            now = self.server.objects.get(name, (b"", 0, ""))[1]
            if condition is not None and int(condition) != now:
                return self.send({"error": {"code": 412, "message": "conditionNotMet"}}, 412)
            updated = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            self.server.objects[name] = data, next(self.server.numbers), updated
        return self.send(self.described(name))

    def described(self, name: str) -> dict[str, Any]:
        data, generation, updated = self.server.objects[name]
        facts = {"name": name, "size": str(len(data)), "generation": str(generation), "updated": updated}
        return {
            "kind": "storage#object",
            **facts,
            "md5Hash": str(hash(data)),
            "timeCreated": updated,
            "bucket": "bucket",
        }

    def send_list(self, asked: dict[str, str]) -> None:
        names = sorted(name for name in self.server.objects if name.startswith(asked.get("prefix", "")))
        return self.send({"items": [self.described(name) for name in names]})

    def send(self, value: Any, status: int = 200) -> None:
        self.reply(status, b"" if status == 204 else json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass
