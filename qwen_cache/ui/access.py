"""Which requests the UI answers: those of its own pages, in a browser that was opened with its token.

The address with `?token=` sets a cookie; without it, or a `Bearer` header, nothing is answered. The address that is
given to the browser is on its command line, which other users of the machine see: its token is another one, for one
use. The name of the host must be this machine's, against names that resolve to it (DNS rebinding). A page of another
origin can neither change nor read anything: its `Origin` and `Sec-Fetch-Site` tell, since other ports of this machine
share cookies. Pages that commands have written run in a sandbox, without cookies and origin: the key in their addresses
opens pages of their kind alone. Bodies without a length, and too long ones, are refused.
"""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen_cache.web import RefusedError, answer, is_loopback

MAX_BODY = 256_000_000  # bytes: images that are uploaded
READING = ("GET", "HEAD")
INSPECTED, RUNS = WRITTEN = ("inspect", "runs")
"""The kinds of pages that commands have written."""
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
WELCOME = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/">'
    '<link rel="icon" href="data:,"><title>qwen-cache ui</title><p><a href="/">Open the UI</a></html>'
)
"""The answer to the address with the token: a page that opens `/`. After a redirect, a browser that came from a page of
another origin would not send the new cookie."""
REFUSAL = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<link rel="icon" href="data:,"><title>qwen-cache ui</title><h1>{}</h1><p>{}</html>'
)
"""To a person who opens a page without the token, such as after the UI was started again."""
STRANGER = RefusedError(
    401, "the token is missing or wrong", "open the address that `qwen-cache ui` printed", WWW_Authenticate="Bearer"
)


def written_pages(token: str, kind: str) -> str:
    """The path of pages that commands have written, which nobody guesses.

    Each kind has a key of its own: a page that came with a run, and gives its address away, opens no page of a cache.
    """
    return f"/written/{hmac.new(token.encode(), f'written pages, {kind}'.encode(), 'sha256').hexdigest()}/{kind}/"


class Access:
    """ASGI middleware that refuses other requests, and adds the headers that protect the pages."""

    def __init__(self, app: ASGIApp, token: str, port: int, token_once: str = "") -> None:
        self.app, self.token, self.token_once = app, token.encode(), token_once
        self.pages = [written_pages(token, kind).encode() for kind in WRITTEN]
        self.cookie = f"qwen_cache_ui_{port}"  # cookies are shared by all ports of a host

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
            self._check_host(headers)
            if self._is_invited(scope):
                cookie = f"{self.cookie}={self.token.decode()}; HttpOnly; SameSite=Strict; Path=/"
                await HTMLResponse(WELCOME, headers={"Set-Cookie": cookie})(scope, receive, send_safely)
                return
            if not (self._is_program(headers) or self._is_written_page(scope)):
                if not self._has_cookie(headers):
                    raise STRANGER
                self._check_origin(scope, headers)
            self._check_body(scope, headers)
        except RefusedError as error:
            error.headers["Connection"] = "close"  # of the body, nothing is read
            accepts = Headers(scope=scope).get("accept", "")
            is_page = error is STRANGER and scope["method"] == "GET" and accepts.startswith("text/html")
            page = HTMLResponse(REFUSAL.format(error.what.capitalize(), error.do), error.status, error.headers)
            await (page if is_page else answer(error))(scope, receive, send_safely)
            return
        await self.app(scope, receive, send_safely)

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if not is_loopback(name):
            raise RefusedError(403, f"this program is for this machine alone, not for {host!r}", "use 127.0.0.1")

    def _is_right(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token)

    def _is_invited(self, scope: Scope) -> bool:
        """Whether this is the address with a token; RefusedError if the token is wrong."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        if given is None or scope["method"] != "GET" or scope["path"] != "/":
            return False
        if self.token_once and hmac.compare_digest(given[0].encode(), self.token_once.encode()):
            self.token_once = ""
            return True
        if not self._is_right(given[0]):
            raise STRANGER
        return True

    def _is_program(self, headers: Headers) -> bool:
        """Whether the token is in the header, which no page of another origin can set."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._is_right(given.strip())

    def _is_written_page(self, scope: Scope) -> bool:
        """Whether a page that a command has written, or a file beside it, is read."""
        path = scope["path"].encode("utf-8", "surrogateescape")
        is_below = [hmac.compare_digest(path[: len(pages)], pages) for pages in self.pages]
        return scope["method"] in READING and any(is_below)

    def _has_cookie(self, headers: Headers) -> bool:
        """Whether our cookie is there, among those of other programs of this machine, which may hold anything."""
        given = (each.strip().partition("=") for each in headers.get("cookie", "").split(";"))
        return any(name == self.cookie and self._is_right(value) for name, _, value in given)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """RefusedError for a request that a page of another origin caused."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        is_foreign = origin is not None and origin != f"http://{headers.get('host', '')}"
        is_foreign |= site not in (None, "same-origin", "none")
        is_unknown = scope["method"] not in READING and origin is None and site != "same-origin"
        if is_foreign or is_unknown:
            raise RefusedError(403, f"requests from pages of {origin!r} are refused", "use the pages of this program")

    def _check_body(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] in READING:
            return
        length = headers.get("content-length")
        if length is None or not length.isdecimal() or "transfer-encoding" in headers:
            raise RefusedError(411, "the body has no length", "send Content-Length")
        if int(length) > MAX_BODY:
            raise RefusedError(413, f"the body has {length} bytes", f"send at most {MAX_BODY}")
