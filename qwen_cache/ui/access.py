"""Which requests the UI answers: those with its token, in a header.

No cookie opens anything: all ports of this machine share cookies, also those that other users listen at. The address
that is printed has the token as its fragment, which browsers keep from servers and other pages; our script sends it as
`Authorization: Bearer`, as programs do. The address that is given to the browser is on its command line, which other
users of the machine see: its token is another one, and `/api/token` exchanges it once.

What a browser asks for by itself has no header. Pages, scripts and styles are the same for everybody, and open to all.
Images, and pages that commands have written, are below `/signed/` with a key of their own, which our script derives
from the token: it opens that address alone, and for a written page the files beside it.

The name of the host must be this machine's, against names that resolve to it (DNS rebinding). `Origin` and
`Sec-Fetch-Site` tell of pages of another origin, which are refused whatever they know. Bodies without a length, and too
long ones, are refused.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen_cache.service.http import RefusedError, answer, as_json, is_loopback

MAX_BODY = 256_000_000  # bytes: images that are uploaded
READING = ("GET", "HEAD")
EXCHANGE, STATIC, SIGNED, WRITTEN = "/api/token", "/static/", "/signed/", "/written/"
IMAGES = ("/api/data/image", "/api/train/image", "/api/generate/preview")
GENERATED = "/api/generate/results/"
"""With `WRITTEN`, what a key can open."""
KEYED = re.compile(rf"{SIGNED}([0-9a-f]{{64}})(/.*)".encode(), re.DOTALL)
BESIDE = re.compile(rf"({WRITTEN}inspect/[^/]+)_files/.*".encode(), re.DOTALL)
"""A file beside a page that `inspect --html` has written, by the name of that page."""
SAFE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Of every answer that has no others."""
REFUSAL = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<link rel="icon" href="data:,"><title>qwen-cache ui</title><h1>{}</h1><p>{}</html>'
)
"""To a person who opens an address with an old key, such as a report after the UI was started again."""
STRANGER = RefusedError(
    401, "the token is missing or wrong", "open the address that `qwen-cache ui` printed", WWW_Authenticate="Bearer"
)


def key_of(token: bytes, address: bytes) -> str:
    """The key that opens an address, path with query, without the token."""
    return hmac.new(token, address, "sha256").hexdigest()


class Access:
    """ASGI middleware that refuses other requests, and adds the headers that protect the pages.

    `pages` are the paths that are open to all; `token_once` is exchanged for the token once.
    """

    def __init__(self, app: ASGIApp, token: str, token_once: str = "", pages: Collection[str] = ()) -> None:
        self.app, self.token, self.token_once, self.pages = app, token.encode(), token_once.encode(), pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**SAFE_HEADERS, "Cache-Control": "no-store"}.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            headers = Headers(scope=scope)
            _check_host(headers)
            path = self._admitted(scope, headers)
            _check_body(scope, headers)
        except RefusedError as error:
            error.headers["Connection"] = "close"  # of the body, nothing is read
            is_page = (
                error is STRANGER and scope["method"] == "GET" and headers.get("accept", "").startswith("text/html")
            )
            page = HTMLResponse(REFUSAL.format(error.what.capitalize(), error.do), error.status, error.headers)
            await (page if is_page else answer(error))(scope, receive, send_safely)
            return
        if path == EXCHANGE:
            await as_json({"token": self.token.decode()})(scope, receive, send_safely)
            return
        await self.app({**scope, "path": path}, receive, send_safely)

    def _admitted(self, scope: Scope, headers: Headers) -> str:
        """The path that is answered; RefusedError for a request without the right to it, or of a foreign page."""
        path, is_reading = str(scope["path"]), scope["method"] in READING
        if is_reading and path.startswith(SIGNED):
            path = self._signed(scope)
        elif is_reading and (path in self.pages or path.startswith(STATIC)):
            if path == "/" and not scope["query_string"]:
                return path  # links lead here, such as that in a terminal in a browser
        elif not self._is_known(_bearer(headers), is_exchange=path == EXCHANGE):
            raise STRANGER
        if not path.startswith(WRITTEN):  # a page in a sandbox asks for the files beside it like a foreign one
            _check_origin(headers)
        return path

    def _signed(self, scope: Scope) -> str:
        """The path that the key in an address opens; RefusedError if it opens none."""
        found = KEYED.fullmatch(scope["raw_path"])
        path = str(scope["path"])[len(SIGNED) + 64 :]
        if found is None or not (path in IMAGES or path.startswith((GENERATED, WRITTEN))):
            raise STRANGER
        query = scope["query_string"]
        page = BESIDE.fullmatch(found[2])
        address = page[1] + b".html" if page else found[2] + (b"?" + query if query else b"")
        if not hmac.compare_digest(found[1], key_of(self.token, address).encode()):
            raise STRANGER
        return path

    def _is_known(self, given: bytes, *, is_exchange: bool) -> bool:
        """Whether this is the token, or the one for one use, which is then used up."""
        if is_exchange and self.token_once and hmac.compare_digest(given, self.token_once):
            self.token_once = b""
            return True
        return hmac.compare_digest(given, self.token)


def _bearer(headers: Headers) -> bytes:
    """The token in the header; empty if there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip().encode() if scheme.lower() == "bearer" else b""


def _check_host(headers: Headers) -> None:
    """RefusedError for another name than this machine's own."""
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name):
        raise RefusedError(403, f"this program is for this machine alone, not for {host!r}", "use 127.0.0.1")


def _check_origin(headers: Headers) -> None:
    """RefusedError for a request that a page of another origin caused."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    is_foreign = origin is not None and origin != f"http://{headers.get('host', '')}"
    if is_foreign or site not in (None, "same-origin", "none"):
        raise RefusedError(403, f"requests from pages of {origin!r} are refused", "use the pages of this program")


def _check_body(scope: Scope, headers: Headers) -> None:
    """RefusedError for a body without a length, or a too long one."""
    if scope["method"] in READING:
        return
    length = headers.get("content-length")
    if length is None or not length.isdecimal() or "transfer-encoding" in headers:
        raise RefusedError(411, "the body has no length", "send Content-Length")
    if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
        raise RefusedError(413, f"the body has {length} bytes", f"send at most {MAX_BODY}")
