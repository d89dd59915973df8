"""Requests for a server of the service that are wrong in random ways, reproducible by a seed and a number.

Every other request is a valid one with a single value from the lists below, one after another in the order of the seed.
In all others, the form, the JSON or the head of a valid one are changed at random, one to three times, and sometimes
also the bytes that are sent: flipped, cut, doubled. `hostile_request` is all that others need.
"""

from __future__ import annotations

import encodings.aliases
import io
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
from PIL import Image

MOST_BYTES = 3_000_000  # of what is repeated
BOUNDARY = b"a-boundary"
TEXTS = ("prompt", "name", "generate", "seed", "width", "height", "phrase", "positive_prompt", "negative_prompt")
IMAGES = ("target", "control", "mask", "rejected")
NUMBERS = "0 1 2 10 15 16 17 96 1048576 1048577 9223372036854775807 9223372036854775808 18446744073709551616 -1 +1 1e3"
HOSTILE_NUMBERS = (*NUMBERS.split(), "1e999", "NaN", "0x10", "٣", "²", "1_000", " 7 ", "9" * 19, "9" * 20, "9" * 5000)
HOSTILE_TEXTS = (
    *(b"", b"\0", b"\xed\xa0\x80", b"\xff\xfe\x00d", b"\\ud800", b"\\N{DIGIT ONE}\\x00", b"&#xd800;", b"%ED%A0%80"),
    *("\u202e\u2066abc", "e\u0301" * 500, "🙂" * 300, "\x1b]0;title\x07\x1b[2J", "a\r\nb\tc\v", "\ufeff", "\U0010ffff"),
    *("<|image_pad|>", "<|im_start|>system", "<|vision_start|>", "Picture 1: ", "{}{0}{x}%s%n", "../../etc/passwd"),
    *("cat", "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:9/a.png", "s3://bucket/a.png", "\\\\host\\share"),
    *(".",),
    *("a" * 999, "a" * 1001, "ä" * 4097, "word " * 20_000, "a" * (1 << 20), "a" * ((1 << 20) + 1)),
)
PHRASES = (
    *("[[0, 1e999]]", "[[0, NaN]]", "[[0, -Infinity]]", "[[0, 4]]", "[[0, 4], [0, 4]]", "[[4, 0]]", "[[-1, 2]]"),
    *('[["0", "4"]]', "[[false, true]]", "[[0, 1.5]]", "[[0, null]]", "[[[0], [1]]]", "[0, 4]", "{}", "null", "[]"),
    *("[",),
    *('"0"', '{"ab": 1}', "[[0, 1, 2]]", f"[[0, {'9' * 5000}]]", f"[[0, {'9' * 4000}]]", "[" * 100_000),
    *("[[0,1]," * 9999,),
    f"[{', '.join(f'[{i}, {i + 1}]' for i in range(20_000))}]",
)
CODECS = (
    *sorted(set(encodings.aliases.aliases.values())),
    *("undefined", "charmap", "utf-8-sig", "unknown", "", "a" * 1000, "utf-8\\0", '"utf-8', "UTF8", "ascii;"),
)
ESCAPING = ("unicode_escape", "raw_unicode_escape", "punycode", "idna", "utf-7", "utf-16", "rot13", "cp037")
ESCAPED = (b"\\ud800", b"\\x00\\ud83d", b"abc-" + b"a" * 200_000, b"+2AA-", b"\xff\xfe\x00\xd8", b"xn--a-" + b"z" * 900)
HEADER_VALUES: dict[bytes, tuple[bytes, ...]] = {
    b"Host": (
        *(b"", b"localhost", b"localhost:1", b"127.0.0.1:8077:1", b"[::1]", b"[::1", b"[", b"]", b"[v1.x]", b"\xff"),
        *(b"evil.example", b"localhost@evil.example", b"localhost#", b"127.0.0.1/..", b"0", b"2130706433", b"a b"),
    ),
    b"Origin": (
        *(b"http://[", b"null", b"http://localhost", b"http://[::1", b"//", b"\xff", b"http://a]b", b"http://\xc3"),
    ),
    b"Authorization": (
        *(b"", b"Bearer", b"Bearer ", b"Bearer \xff\xfe", b"Basic eA==", b"Bearer " + b"x" * 9000, b"\xe2"),
    ),
    b"Content-Length": (b"-1", b"0", b"1", b"+5", b"5, 6", b"1e3", b"\xb2", b"9" * 30, b"0x10", b"", b" 7", b"5, 5"),
    b"Content-Type": (
        *(b"", b"multipart/form-data", b"multipart/form-data; boundary=", b"multipart/form-data; boundary", b"\xff"),
        *(b'multipart/form-data; boundary="', b"multipart/form-data; boundary=" + b"x" * 5000, b"application/json"),
        *(b"multipart/form-data; boundary=a-boundary; boundary=b", b"multipart/form-data; boundary*=utf-8''a-boundary"),
        *(b"multipart/form-data; boundary=a-boundary; charset*=utf-8''a", b"application/x-www-form-urlencoded", b";"),
        *(b"multipart/form-data; boundary=a-boundary; charset=" + codec.encode() for codec in CODECS[-10:]),
        *(b"application/json; charset=utf-16", b"text/plain", b"application/json; charset=\xff", b"a/b; c=d; " * 500),
    ),
    b"Content-Encoding": (b"gzip", b"deflate", b"\xff"),
    b"Transfer-Encoding": (b"chunked", b"gzip, chunked", b"identity", b"chunked, chunked", b"\xff"),
    b"Range": (
        *(b"bytes=0-", b"bytes=-1", b"bytes=0-0", b"bytes=5-2", b"bytes=-0", b"bytes=99999999999-", b"bytes="),
        *(b"bytes",),
        *(b"bytes=a-b", b"bytes=0-1,3-4", b"bytes=0-1," * 3000, b"bytes=0-" + b"9" * 5000, b"pages=1-2"),
        *(b"bytes=\xb2-",),
        *(b"bytes=--1", b"bytes=0-1,0-1,0-1", b"bytes=-" + b"9" * 30, b"bytes=0 - 1", b"bytes=\xff", b"bytes=1-1,0-0"),
    ),
    b"If-Range": (b"a", b'"', b"\xff", b"Thu, 01 Jan 1970 00:00:00 GMT", b"x" * 5000),
    b"If-None-Match": (b"*", b'"a"', b"\xff"),
    b"Expect": (b"100-continue", b"200-ok", b""),
    b"Connection": (b"close", b"Upgrade", b"keep-alive", b"close, \xff"),
    b"Upgrade": (b"websocket", b"h2c", b"TLS/1.0"),
    b"Accept-Encoding": (b"gzip", b"*;q=nan", b"\xff"),
    b"Cookie": (b"a=b; \xff", b"x" * 60_000),
    b"Forwarded": (b"for=[::1", b"for=unknown"),
    b"X-Forwarded-For": (b"::1, \xff", b"a" * 5000),
    b"X-\xff": (b"1",),
    b"A B": (b"1",),
    b"": (b"1",),
    b"X" * 65_000: (b"1",),
}
METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT", b"get", b"M" * 99)
TARGETS = (
    *(b"*", b"", b"/", b"//", b"/v1/", b"//v1", b"/v1/../v1", b"/%00", b"/\xff", b"/%ff", b"/v1/%2e%2e", b"/v1?"),
    *(b"/docs",),
    *(b"http://evil.example/v1", b"http://[/v1", b"evil.example:443", b"/v1#a", b"/v1 /v1", b"/" + b"a" * 60_000),
    *(b"/v1/cache/..%2f..%2fetc%2fpasswd", b"/v1/cache/", b"/v1/cache/%00", b"/v1/cache/.replaced"),
    *(b"/v1/cache/qwen.yaml",),
    *(b"/v1/cache/" + b"a" * 300, b"/v1/cache/" + b"0" * 32 + b".tar", b"/v1/cache/%ed%a0%80"),
    *(b"/v1/cache//etc/passwd",),
    *(b"/v1/samples/%00", b"/v1/samples/" + b"0" * 31 + b"\xb2", b"/v1/samples/" + b"0" * 32 + b"%0a", b"/v1/samples/"),
)
QUERY_NUMBERS = (
    "0",
    "0.1",
    "-1",
    "1e999",
    "nan",
    "inf",
    "1e-9",
    "61",
    "9e99",
    "[]",
    "9" * 19,
    "1%00",
    "%ff",
    "%ed%a0%80",
)
JSON_TEXTS = (
    *("", "\ud800", "\0", "a" * 100_000, "<|image_pad|>", "0" * 32, "g" * 32, "0" * 32 + "\n", "00000", "../00000"),
    *("stored", "encoded", "STORED", "failed", "\u202e", "🙂", "٣" * 32),
)
JSON_LITERALS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "-0", "9" * 400, "9" * 4300, "9" * 5000, "1.5"),
    *("9223372036854775808", "-1", "1048577", "true", "null", "[]", "{}", "[" * 300 + "]" * 300, "[" * 90_000),
    *("{" * 999,),
    *('{"a":' * 50_000, "[" * 90_000 + "]" * 90_000, '"\\ud800"', '"\\', '"\x01"', "'a'", "//", "0x1", "01", "+1"),
)
PLACEHOLDER = "a literal stands here"


@dataclass
class Part:
    """A field of a multipart form; an image has a file name."""

    name: bytes
    data: bytes
    file_name: bytes | None = None
    headers: tuple[bytes, ...] = ()

    def raw(self) -> bytes:
        file_name = b"" if self.file_name is None else b'; filename="' + self.file_name + b'"'
        head = [b'Content-Disposition: form-data; name="' + self.name + b'"' + file_name, *self.headers]
        return b"\r\n".join([*head, b"", self.data, b""])


@dataclass
class Request:
    """A request until its bytes are made; the body is the form, or the JSON value, or nothing."""

    method: bytes
    target: bytes
    form: list[Part] | None = None
    value: Any = None
    literal: str = ""
    """Stands where `value` has the placeholder."""
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [(b"Host", b"localhost")])
    boundary: bytes = BOUNDARY

    def raw(self) -> bytes:
        body, content_type = b"", b""
        if self.form is not None:
            parts = b"".join(b"--" + self.boundary + b"\r\n" + part.raw() for part in self.form)
            body, content_type = parts + b"--" + self.boundary + b"--\r\n", b"multipart/form-data; boundary=" + BOUNDARY
        elif self.value is not None:
            text = json.dumps(self.value).replace(f'"{PLACEHOLDER}"', self.literal)
            body, content_type = text.encode("utf-8", "surrogatepass"), b"application/json"
        headers = list(self.headers)
        given = {name.lower() for name, _ in headers}
        if content_type and b"content-type" not in given:
            headers.append((b"Content-Type", content_type))
        if body and not {b"content-length", b"transfer-encoding"} & given:
            headers.append((b"Content-Length", str(len(body)).encode()))
        head = [self.method + b" " + self.target + b" HTTP/1.1", *(name + b": " + value for name, value in headers)]
        return b"\r\n".join([*head, b"", body])


def hostile_request(seed: int, number: int, token: bytes | None = None) -> bytes:
    """The bytes of a request; the same for the same arguments."""
    random = Random(f"{seed}/{number}")
    is_listed = number % 2 == 0
    request = _listed(seed, number // 2)(random) if is_listed else random.choice(ROUTES)(random)
    if token is not None and random.random() < 0.95:
        request.headers.append((b"Authorization", b"Bearer " + token))
    if is_listed:
        return request.raw()
    own = FORM_CHANGES if request.form is not None else JSON_CHANGES if request.value is not None else HEAD_CHANGES
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        random.choice(own if random.random() < 0.75 else HEAD_CHANGES)(random, request)
    raw = request.raw()
    return random.choice(BYTE_CHANGES)(random, raw) if random.random() < 0.25 else raw


# ---- valid requests -------------------------------------------------------------------------------------------------


def _a_page(random: Random) -> Request:
    paths = b"/ /healthz /readyz /metrics /openapi.json /v1 /v1/rows /v1/rows?begin=1 /v1/samples/".split()
    path = random.choice(paths)
    return Request(b"GET", path + b"%032x?seconds=0.1" % random.getrandbits(128) if path.endswith(b"s/") else path)


def _a_file(random: Random) -> Request:
    request = Request(b"GET", b"/v1/cache/" + random.choice((b"cache.json", b"index.parquet")))
    request.headers.append((b"Range", random.choice(HEADER_VALUES[b"Range"])))
    return request


def _a_row(random: Random, *, generates: bool | None = None) -> Request:
    parts = [Part(b"prompt", b"make it %d" % random.randrange(10**9)), Part(b"name", b"%d" % random.randrange(10**9))]
    if random.random() < 0.25 if generates is None else generates:
        width, height = random.choice((b"96", b"256", b"4096")), random.choice((b"64", b"256"))
        parts += [Part(b"generate", b"1"), Part(b"width", width), Part(b"height", height), Part(b"seed", b"3")]
    else:
        parts.append(Part(b"target", _png(random), b"target.png"))
    parts += [Part(b"control", _png(random), b"control.png")] * random.choice((1, 1, 2))
    return Request(b"POST", b"/v1/samples", form=parts)


def _named_rows(random: Random) -> Request:
    return Request(b"POST", b"/v1/rows", value={"names": [f"{random.randrange(5):05}"]})


def _states(random: Random) -> Request:
    keys = [f"{random.getrandbits(128):032x}" for _ in range(3)]
    return Request(b"POST", b"/v1/states", value={"keys": keys, "wait": "stored", "seconds": 0.1})


def _lengths(random: Random) -> Request:
    prompts = [{"prompt": f"number {random.random()}", "controls": [[96, 64]]} for _ in range(2)]
    return Request(b"POST", b"/v1/lengths", value={"prompts": prompts})


ROUTES: tuple[Callable[[Random], Request], ...] = (
    *(_a_page, _a_file, _named_rows, _states, _lengths),
    *(_a_row, _a_row, _a_row, _a_row),  # most of what can go wrong is in a row
)


def _listed(seed: int, number: int) -> Callable[[Random], Request]:
    """One of the single changes; all of them come once before the first comes again."""
    cases = _single_changes()
    return cases[_order(seed)[number % len(cases)]]


@cache
def _order(seed: int) -> list[int]:
    return Random(seed).sample(range(count := len(_single_changes())), count)


@cache
def _single_changes() -> list[Callable[[Random], Request]]:
    texts = [(name, value) for name in ("prompt", "name") for value in HOSTILE_TEXTS]
    texts += [(name, value) for name in ("seed", "width", "height", "generate") for value in HOSTILE_NUMBERS]
    texts += [("phrase", value) for value in PHRASES]
    codecs = [(codec, "name", ESCAPED[0]) for codec in CODECS]
    codecs += [(codec, name, text) for codec in ESCAPING for name in ("name", "prompt") for text in ESCAPED]
    return [
        *(partial(_row_with, name, value) for name, value in texts),
        *(partial(_row_decoded_as, *each) for each in codecs),
        *(partial(_with_header, name, value) for name, values in HEADER_VALUES.items() for value in values),
        *(partial(_with_target, target) for target in TARGETS),
        *(partial(_with_literal, literal) for literal in JSON_LITERALS),
    ]


def _row_with(name: str, value: str | bytes, random: Random) -> Request:
    request = _a_row(random, generates=name in ("seed", "width", "height", "generate"))
    _replace(request, name, value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass"))
    return request


def _row_decoded_as(codec: str, name: str, text: bytes, random: Random) -> Request:
    _decode_as(request := _a_row(random), codec, name, text)
    return request


def _with_header(name: bytes, value: bytes, random: Random) -> Request:
    routes = (_a_file,) if name in (b"Range", b"If-Range") else (_a_row, _states, _a_page)
    request = random.choice(routes)(random)
    request.headers = [each for each in request.headers if each[0] != name] + [(name, value)]
    return request


def _with_target(target: bytes, random: Random) -> Request:
    return Request(random.choice((b"GET", b"GET", b"HEAD", b"POST")), target)


def _with_literal(literal: str, random: Random) -> Request:
    request = random.choice((_states, _lengths, _named_rows))(random)
    holder, key = random.choice(_places(request.value))
    holder[key], request.literal = PLACEHOLDER, literal
    return request


# ---- changes of a form ----------------------------------------------------------------------------------------------


def _text(random: Random) -> bytes:
    text: str | bytes = random.choice(random.choice((HOSTILE_TEXTS, HOSTILE_NUMBERS, PHRASES)))
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def _set_text(random: Random, request: Request) -> None:
    assert request.form is not None
    name = random.choice(TEXTS)
    values = HOSTILE_NUMBERS if name in ("seed", "width", "height") else PHRASES if name == "phrase" else None
    value = random.choice(values).encode() if values and random.random() < 0.8 else _text(random)
    _replace(request, name, value)


def _set_sizes(random: Random, request: Request) -> None:
    assert request.form is not None
    names = (b"width", b"height", b"target", b"generate")
    sides = [Part(name, random.choice(HOSTILE_NUMBERS).encode()) for name in names[:2]]
    request.form = [part for part in request.form if part.name not in names] + [*sides, Part(b"generate", b"1")]


def _change_parts(random: Random, request: Request) -> None:
    """Drop, repeat or swap parts, or send very many."""
    assert request.form is not None
    part = random.choice(request.form) if request.form else Part(b"prompt", b"x")
    change = random.randrange(5)
    if change == 0:
        request.form = [each for each in request.form if each is not part]
    elif change == 1:
        request.form += [part] * min(random.choice((1, 2, 31, 32, 33, 1001)), 1 + MOST_BYTES // (1 + len(part.data)))
    elif change == 2:
        random.shuffle(request.form)
    elif change == 3:
        request.form = []
    else:
        name = random.choice((b"", b"other", b"Prompt", b"prompt\0", b"\xff", b"target[]", b"x" * 70_000, b"__class__"))
        request.form = [*request.form, Part(name, part.data, part.file_name)]


def _change_part(random: Random, request: Request) -> None:
    """A text as a file, a file as a text, another file name, other headers."""
    assert request.form is not None
    if not request.form:
        return
    part = request.form[(at := random.randrange(len(request.form)))]
    change = random.randrange(3)
    if change == 0:
        file_name = b"a.png" if part.file_name is None else None
        request.form[at] = Part(part.name, part.data, file_name)
    elif change == 1:
        names = (
            b"",
            b'"',
            b"a\0b",
            b"../../a",
            b"\xff\xed\xa0\x80",
            b"a" * 9000,
            b"a\\",
            b"%00",
            b"a\x1b[2J",
            _text(random),
        )
        request.form[at] = Part(part.name, part.data, random.choice(names))
    else:
        headers = (
            *(b"Content-Type: text/plain; charset=punycode", b"Content-Type: image/png", b"Content-Type: \xff", b":"),
            *(b"a",),
            *(b"Content-Disposition: form-data", b"Content-Transfer-Encoding: base64", b"X: " + b"y" * 60_000),
            *(b"Content-Disposition: form-data; filename*=utf-8''%ff%00", b"\0", b"Content-Disposition: \xed\xa0\x80"),
        )
        request.form[at] = Part(part.name, part.data, part.file_name, (random.choice(headers),))


def _change_image(random: Random, request: Request) -> None:
    assert request.form is not None
    name = random.choice(IMAGES).encode()
    data = _hostile_image(random)
    if random.random() < 0.5:
        request.form = [part for part in request.form if part.name != name]
    request.form = [*request.form, Part(name, data, b"image")]


def _set_codec(random: Random, request: Request) -> None:
    """Any codec of Python as the form's charset, with a text that it decodes to something strange or slowly."""
    codec = random.choice(random.choice((CODECS, ESCAPING)))
    _decode_as(request, codec, random.choice(("name", "prompt", "phrase")), random.choice(ESCAPED))


def _decode_as(request: Request, codec: str, name: str, text: bytes) -> None:
    content_type = f"multipart/form-data; boundary={BOUNDARY.decode()}; charset={codec}"
    request.headers.append((b"Content-Type", content_type.encode()))
    _replace(request, name, text)


def _replace(request: Request, name: str, data: bytes, file_name: bytes | None = None) -> None:
    """Make this the only part of this name."""
    assert request.form is not None
    part = Part(name.encode(), data, file_name)
    request.form = [each for each in request.form if each.name != part.name] + [part]


def _change_boundary(random: Random, request: Request) -> None:
    names = (b"", b"b", b"a-boundar", b"a-boundary-", b"a-boundary\r\n--a-boundary", b"\0", b"\xff", b"x" * 5000)
    request.boundary = random.choice(names)


FORM_CHANGES: tuple[Callable[[Random, Request], None], ...] = (
    *(_set_text, _set_text, _set_text, _set_sizes, _change_parts, _change_part),
    *(_change_image, _change_image, _set_codec, _change_boundary),
)


# ---- changes of JSON ------------------------------------------------------------------------------------------------


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every value in a JSON value, as what holds it and its key there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def _set_value(random: Random, request: Request) -> None:
    holder, key = random.choice(_places(request.value) or [({}, 0)])
    change = random.randrange(4)
    if change == 0:
        holder[key] = random.choice(JSON_TEXTS)
    elif change == 1:
        holder[key] = [holder.get(key)] if isinstance(holder, dict) else {"a": holder[key]}
    else:
        holder[key], request.literal = PLACEHOLDER, random.choice(JSON_LITERALS)


def _lengthen(random: Random, request: Request) -> None:
    lists = [holder[key] for holder, key in _places(request.value) if isinstance(holder[key], list)]
    if lists and (chosen := random.choice(lists)):
        chosen *= min(random.choice((0, 7, 33, 101, 1000, 10_001, 30_000)), MOST_BYTES // len(json.dumps(chosen)))


def _change_keys(random: Random, request: Request) -> None:
    if not isinstance(request.value, dict) or not request.value:
        return
    if random.random() < 0.5:
        request.value.pop(random.choice(list(request.value)))
    else:
        name = random.choice(("other", "", "\ud800", "__class__", "a" * 100_000))
        request.value[name] = random.choice(("x", PLACEHOLDER))
        request.literal = random.choice(JSON_LITERALS)


def _set_whole(random: Random, request: Request) -> None:
    request.value, request.literal = PLACEHOLDER, random.choice(JSON_LITERALS)


JSON_CHANGES: tuple[Callable[[Random, Request], None], ...] = (
    *(_set_value, _set_value, _set_value),
    *(_lengthen, _change_keys, _set_whole),
)


# ---- changes of the head, and of the bytes --------------------------------------------------------------------------


def _set_header(random: Random, request: Request) -> None:
    name = random.choice(list(HEADER_VALUES))
    if random.random() < 0.7:
        request.headers = [each for each in request.headers if each[0] != name]
    request.headers.append((name, random.choice(HEADER_VALUES[name])))


def _many_headers(random: Random, request: Request) -> None:
    request.headers += [(b"X-%d" % i, b"y") for i in range(random.choice((50, 2000, 10_000)))]


def _no_host(random: Random, request: Request) -> None:
    request.headers = [each for each in request.headers if each[0] != b"Host"] * random.choice((1, 2))


def _set_method(random: Random, request: Request) -> None:
    request.method = random.choice(METHODS)


def _set_target(random: Random, request: Request) -> None:
    if random.random() < 0.5:
        request.target = random.choice(TARGETS)
    else:
        name = random.choice(("begin", "seconds", "x", "%ff", "begin&begin"))
        request.target += f"?{name}={random.choice(QUERY_NUMBERS)}".encode()


HEAD_CHANGES: tuple[Callable[[Random, Request], None], ...] = (
    *(_set_header, _set_header, _set_header, _set_header, _set_header, _set_header),
    *(_set_method, _set_target, _set_target, _many_headers, _no_host),
)


def _flip(random: Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(random.choice((1, 2, 10))):
        data[random.randrange(min(len(data), random.choice((200, 10**9))))] ^= 1 << random.randrange(8)
    return bytes(data)


def _cut(random: Random, raw: bytes) -> bytes:
    return raw[: random.randrange(1, len(raw))]


def _insert(random: Random, raw: bytes) -> bytes:
    at = random.randrange(len(raw))
    return raw[:at] + random.choice((b"\0", b"\r\n", b"\n", b"\r\n\r\n", b"\xff" * 9, random.randbytes(50))) + raw[at:]


def _double(random: Random, raw: bytes) -> bytes:
    return raw * random.choice((2, 5))


def _line_ends(random: Random, raw: bytes) -> bytes:
    return raw.replace(b"\r\n", random.choice((b"\n", b"\r", b"\r\n ", b"\n\n")))


def _noise(random: Random, raw: bytes) -> bytes:
    first = (
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n\r\n",
        b"GET / HTTP/0.9\r\n",
    )
    return random.choice((random.randbytes(300), random.choice(first), random.choice(first) + raw))


BYTE_CHANGES: tuple[Callable[[Random, bytes], bytes], ...] = (
    _flip,
    _flip,
    _flip,
    _cut,
    _insert,
    _double,
    _line_ends,
    _noise,
)


# ---- images ---------------------------------------------------------------------------------------------------------

FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "ICO",
    "PPM",
    "TGA",
    "PCX",
    "JPEG2000",
    "EPS",
    "DDS",
    "SGI",
)
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16", "F", "YCbCr")
SIZES = ((96, 64), (1, 1), (1, 300), (300, 1), (15, 17), (2, 399), (700, 500), (1500, 1500))


def _pattern(random: Random, size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(random.getrandbits(64)).integers(0, 255, (8, 8, 3), np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def _png(random: Random) -> bytes:
    file = io.BytesIO()
    _pattern(random, (96, 64)).save(file, "PNG")
    return file.getvalue()


def _hostile_image(random: Random) -> bytes:
    data = random.choice((_encoded, _encoded, _made_up, _with_chunks))(random)
    change = random.randrange(4)
    if change == 0 and len(data) > 1:
        return data[: random.randrange(len(data))]
    if change == 1 and data:
        return _flip(random, data)
    return data


def _encoded(random: Random) -> bytes:
    """A pattern in a random mode, size and format, where Pillow can write that."""
    file, kind, mode = io.BytesIO(), random.choice(FORMATS), random.choice(MODES)
    try:
        image = _pattern(random, random.choice(SIZES)).convert(mode)
        options = {"save_all": True, "append_images": [image.copy()]} if random.random() < 0.2 else {}
        exif = Image.Exif()
        exif[0x0112] = random.choice((0, 3, 6, 8, 9, 65_535))
        image.save(file, kind, **options, **({"exif": exif} if kind in ("PNG", "JPEG", "WEBP") else {}))
    except (OSError, ValueError, KeyError):
        return _png(random)
    return file.getvalue()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png_of(width: int, height: int, *chunks: bytes, depth: int = 8, colours: int = 2) -> bytes:
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + b"".join([head, *chunks, _chunk(b"IEND", b"")])


def _made_up(random: Random) -> bytes:
    """A header that claims very much, or another kind of file."""
    pixels = _chunk(b"IDAT", zlib.compress(bytes(1000)))
    return random.choice(
        (
            *(_png_of(60_000, 60_000, pixels), _png_of(2**31 - 1, 1, pixels), _png_of(0, 0, pixels)),
            *(_png_of(5000, 5000),),
            *(_png_of(9, 9, pixels, depth=3), _png_of(9, 9, pixels, colours=9), _png_of(8, 8, _chunk(b"IDAT", b""))),
            *(b"%PDF-1.4\n", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"),
            *(b"<svg xmlns='http://www.w3.org/2000/svg'/>",),
            *(b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(99),),
            *(b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03" + bytes(99),),
            *(b"BM" + struct.pack("<IIIIiiHHII", 99, 0, 54, 40, -(2**31), 2**31 - 1, 1, 24, 0, 0) + bytes(99),),
            *(b"PK\3\4" * 9,),
            *(b"II*\0\x08\0\0\0\xff\xff" + bytes(99), b"II*\0\x08\0\0\0\0\0\x08\0\0\0"),
            *(b"P6 99999999 99999999 255\n", b"\0"),
            *(b"RIFF\xff\xff\xff\xffWEBPVP8X\n\0\0\0\0\0\0\0" + b"\xff" * 6, b"\0\0\0\x18ftypheic" + bytes(99), b""),
            *(b"\xff\x0a" + bytes(99), b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(99), b"\0\0\0\x1cftypavif" + b"\xff" * 99),
        )
    )


@cache
def _bomb() -> bytes:
    return zlib.compress(bytes(20_000_000), 9)


def _with_chunks(random: Random) -> bytes:
    """A small PNG with a strange chunk before its pixels."""
    bomb = _bomb()
    chunks = (
        *(_chunk(b"zTXt", b"a\0\0" + bomb), _chunk(b"iCCP", b"a\0\0" + bomb), _chunk(b"iTXt", b"a\0\1\0\0\0" + bomb)),
        *(_chunk(b"iCCP", b"a\0\0" + zlib.compress(b"no profile")),),
        *(_chunk(b"eXIf", b"II*\0\x08\0\0\0\xff\xff" + bytes(9)),),
        *(_chunk(b"acTL", struct.pack(">II", 2**31, 0)), _chunk(b"PLTE", bytes(3)), _chunk(b"tRNS", bytes(9))),
        *(b"\0" * 12,),
        *(_chunk(b"gAMA", bytes(4)), _chunk(b"pHYs", b"\xff" * 9), _chunk(b"IHDR", bytes(13))),
        *(_chunk(b"\xff\xff\xff\xff", b""),),
    )
    pixels = _chunk(b"IDAT", zlib.compress(bytes(64 * (1 + 3 * 64))))
    return _png_of(64, 64, random.choice(chunks), pixels)
