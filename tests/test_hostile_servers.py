"""An HTTP server can neither fill a reader's memory nor keep it waiting, whatever it sends.

A server of encoders besides decides nothing but what SECURITY.md says. `qwen_cache/storage/bounds.py` has the limits;
`support/server.py` the servers that break them.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import fsspec
import pytest

from qwen_cache import FormatError, QwenCacheError, open_cache
from qwen_cache.errors import ConfigError, ServerSilentError, SourceError, TooLargeError
from qwen_cache.format import directory
from qwen_cache.format.cache import sample_file
from qwen_cache.format.identity import recipe_id
from qwen_cache.format.shard import tensor_bytes
from qwen_cache.service import client as client_module
from qwen_cache.service import client as connection
from qwen_cache.service.client import PATIENCE, Client, Sizes
from qwen_cache.settings.sections import SIZES
from qwen_cache.sources.places import read_bytes
from qwen_cache.storage import bounds, remote
from qwen_cache.storage.http_client import bounded_client

from .support.commands import Result, refused, run
from .support.paths import ROOT
from .support.server import Answer, Scripted, Server, serving
from .support.waiting import wait_until

BUFFERS = 20_000_000
"""More than the buffers of both systems between two programs on one machine."""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A cache by HTTP; retries do not wait."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    cache = ROOT / "schemas" / "examples" / "valid" / "cache.v2"
    with serving(Server(Path(shutil.copytree(cache, tmp_path / "served")))) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short time limits, in clients of their own; a request for a block may take 8 seconds in all, a slow one less."""
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    monkeypatch.setattr(bounds, "SILENCE", 0.3)
    monkeypatch.setattr(bounds, "PATIENCE", 5.0)
    monkeypatch.setattr(bounds, "SLOWEST", 1_000_000)
    monkeypatch.setattr(connection, "WAIT", 0)
    files = fsspec.get_filesystem_class("http")
    files.clear_instance_cache()
    yield
    files.clear_instance_cache()


@dataclass(frozen=True)
class Here:
    """The files of this machine that a command needs."""

    folder: Path
    model: Callable[[str], Path]


def command(*arguments: str | Path) -> str:
    """The message of a command that fails."""
    result = run("qwen-cache", *arguments)
    refused(result)
    return result.stderr


def read(action: Callable[[remote.Url], object], url: str) -> str:
    """The message of an error of the storage."""
    with pytest.raises(QwenCacheError) as refusal:
        action(remote.Url(url, "cache.json"))
    return str(refusal.value)


CACHE, SOURCE, ENCODERS = (
    "a cache: `verify URL`",
    "a table or an image of a source: `build URL/pairs.jsonl`",
    "a server of encoders: `build --at URL`, `run --encode-at URL`",
)
ACCESS: dict[str, Callable[[str, Here], str]] = {
    CACHE: lambda url, here: command("verify", url),
    SOURCE: lambda url, here: command(
        *("build", f"{url}/pairs.jsonl", "--dry-run", "--model", here.model("edit-plus"), "--out", here.folder / "out")
    ),
    ENCODERS: lambda url, here: command("build", here.folder / "data", "--at", url, "--out", here.folder / "out"),
    "reading": lambda url, here: read(remote.Url.read_bytes, url),
    "size": lambda url, here: read(remote.Url.size, url),
    "listing": lambda url, here: read(remote.Url.find, url),
}
"""The kinds of access in SECURITY.md, and the operations of the storage that the first two consist of."""
ANOTHER_ERROR = {
    (CACHE, "drip"): "does not answer requests for a range of bytes (expected 1 bytes, found more)",
    (ENCODERS, "slow redirects"): "the server refuses a request (found status 302: status 302)",
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", ACCESS)
@pytest.mark.parametrize("trick", ["silent", "drip", "slow header", "slow redirects", "continue"])
def test_a_server_that_does_not_answer_in_time_is_an_error(
    trick: str, what: str, served: Server, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """Mute, a body or a head by single bytes, redirects or announcements of an answer without end."""
    served.trick = trick
    if (what, trick) == ("size", "drip"):
        assert remote.Url(served.url, "cache.json").size() is None  # the head came
        return
    says = ACCESS[what](served.url, Here(tmp_path, tiny_model))
    if expected := ANOTHER_ERROR.get((what, trick)):
        assert expected in says
        return
    assert "(found no answer for 0.3 seconds, or less than 1000000 bytes a second for 0.3)\n  → " in says
    assert "check the connection and run the same command again" in says or "start `qwen-cache serve` there" in says


def test_security_md_says_how_long_a_server_may_be_silent() -> None:
    table = (ROOT / "SECURITY.md").read_text(encoding="utf-8").partition("| access to |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [CACHE, SOURCE, ENCODERS]
    body = f"{bounds.SLOWEST // 1000} kB/s in each {bounds.SILENCE:g} seconds"
    head, long_poll = f"{bounds.SILENCE:g} seconds", f"{connection.WAIT + bounds.SILENCE:g} seconds"
    here, there = f"{bounds.PATIENCE:g} seconds", f"{PATIENCE:g} seconds"
    assert [row[1:] for row in rows] == [[head, body, here], [head, body, here], [long_poll, body, there]]


@pytest.mark.parametrize("trick", ["endless", "huge"])
def test_an_answer_without_end_is_read_up_to_what_was_asked_for(trick: str, served: Server) -> None:
    served.trick = trick
    url = remote.Url(served.url, "cache.json")
    for read in (url.read_bytes, url.require_ranges):
        with pytest.raises(
            QwenCacheError, match=r"does not answer requests for a range of bytes \(expected \d+ bytes, f"
        ):
            read()
    assert served.sent < remote.BLOCK + BUFFERS


@pytest.mark.parametrize("trick", ["endless", "folders"])
def test_a_listing_without_end_is_refused(trick: str, served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page, or a folder in every folder."""
    monkeypatch.setattr(bounds, "LISTING", 20_000)
    served.trick = trick
    with pytest.raises(
        TooLargeError, match=r"the listing of this folder is too large \(expected at most 20000 bytes\)\n  → name"
    ):
        remote.Url(served.url).find()
    assert served.sent < BUFFERS
    assert remote.Url(served.url).glob("*.tar") == []


def test_a_compressed_answer_is_refused_and_never_unpacked(served: Server) -> None:
    served.trick = "gzip"
    with pytest.raises(QwenCacheError, match=r"compresses what must be sent as it is \(found Content-Encoding: gzip\)"):
        remote.Url(served.url, "cache.json").read_bytes()


def test_files_that_are_read_whole_have_a_largest_size(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index has that of its manifest."""
    monkeypatch.setattr(remote, "BLOCK", 1000)
    index = served.folder / "index.parquet"
    index.write_bytes(index.read_bytes() + bytes(5_000))
    with pytest.raises(FormatError, match=r"not the one that the manifest names \(.*found a larger file\) \[F7\]"):
        open_cache(served.url)
    url, size = remote.Url(served.url, "index.parquet"), index.stat().st_size
    assert url.read_bytes(size) == index.read_bytes()
    message = rf"index.parquet: the file is too large \(expected at most {size - 1} bytes, found {size}\)"
    with pytest.raises(TooLargeError, match=message):
        url.read_bytes(size - 1)
    with pytest.raises(SourceError, match=message):
        read_bytes(url, size - 1)


def test_a_shard_whose_size_is_a_lie_costs_one_request(served: Server) -> None:
    """A manifest that says more than the server has costs nothing: no disk space, no list of a million requests."""
    path = sorted(served.folder.glob("*.tar"))[0]
    with pytest.raises(QwenCacheError, match=r"\.tar: reading the bytes 1099511627775 to 1099511627776 "):
        remote.Url(served.url, path.name).download(1 << 40)
    assert len(served.requests) <= remote.ATTEMPTS


def test_other_users_of_fsspec_keep_their_client(served: Server) -> None:
    """Neither do they get our bounds, nor we their session."""
    theirs = fsspec.filesystem("http")
    open_cache(served.url)
    assert fsspec.filesystem("http") is theirs
    assert theirs.get_client is not bounded_client
    assert len(theirs.cat_file(f"{served.url}/cache.json")) == (served.folder / "cache.json").stat().st_size


# ---- servers of encoders ---------------------------------------------------------------------------------------------

EXAMPLE = ROOT / "schemas" / "examples" / "valid" / "cache.v2"
SAMPLES = "/v1/samples"
RECIPE = {"encoder_version": 1, "pipeline": "QwenImageEditPlusPipeline", "dtype": "bfloat16"}
DESCRIPTION: dict[str, Any] = {
    "qwen_cache": "0.1",
    "format_version": 2,
    "pipeline": RECIPE["pipeline"],
    "model": "a model",
    "recipe_id": recipe_id(RECIPE),
    "recipe": RECIPE,
    "data": {"vae_image_size": [16384]},
    "thumbnails": False,
    "prompt_embeds_width": 64,
    "samples": 0,
    "cache": None,
    "limits": {"max_body": 1, "max_pixels": 1, "queue_samples": 1},
}


def as_json(value: object, status: int = 200, **headers: str) -> Answer:
    """An answer with this value."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return status, {"Content-Length": str(len(body)), **headers}, [body]


def sample_bytes(position: int) -> bytes:
    """A sample of the example, as a server sends it."""
    row = open_cache(EXAMPLE)[position].row
    return b"".join(sample_file(row.meta, dict(tensor_bytes(row.entry, directory.map_shard(EXAMPLE, row.shard))), 2))


def endless(piece: bytes = bytes(65_536), **headers: str) -> Answer:
    """An answer without end."""
    return 200, headers, itertools.repeat(piece)


class Encoders(Scripted):
    """A server with a description and one sample, which it has for every row and every key."""

    def __init__(self, **changed: object) -> None:
        """`changed`: what it has in place of a part of its description, or of the answer to a `METHOD path`."""
        super().__init__(self.scripted)
        self.key, self.file = open_cache(EXAMPLE)[1].key, sample_bytes(1)
        parts = {name: value for name, value in changed.items() if "/" not in name}
        self.answers: dict[str, Any] = {
            "GET /v1": as_json(DESCRIPTION | parts),
            f"POST {SAMPLES}": as_json({"samples": [{"key": self.key, "state": "accepted"}]}, 202),
            f"GET {SAMPLES}": as_json(self.file),
            **{name: value for name, value in changed.items() if "/" in name},
        }

    def scripted(self, method: str, path: str) -> Answer:
        answer = self.answers[f"{method} {SAMPLES if path.startswith(SAMPLES) else path}"]
        return next(answer) if isinstance(answer, Iterator) else answer


def build_at(url: str, folder: Path, *options: str) -> Result:
    return run("qwen-cache", "build", "--at", url, "--out", folder / "out", *options)


FORBIDDEN = {
    "source": "/home/me/private",
    "allow_urls": ["file://"],
    "on_error": "skip",
    "columns": {"target": "secret"},
    "mask_head": "/etc/passwd",
    "trigger_word": "x",
    "of a later version": 1,
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_server_decides_the_sizes_alone(
    name: str, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never what this machine reads and sends."""
    monkeypatch.chdir(tmp_path)  # `data` is the default source
    value = str(pairs) if name == "source" else FORBIDDEN[name]
    with serving(Encoders(data={"vae_image_size": [16384], name: value})) as server:
        refused(build_at(server.url, tmp_path), f"another version (found data.{name}: Extra inputs are not permitted)")
    assert server.asked == ["GET /v1"]
    assert set(Sizes.model_fields) == set(SIZES)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": {"vae_image_size": [1 << 31]}}, "found data.vae_image_size.0: expected less than or equal"),
        ({"data": {"vae_image_size": [16384] * 101}}, "found data.vae_image_size: List should have at most 100 items"),
        ({"data": {"resolution": [[32, 1 << 20]]}}, "found data.resolution.0.1: expected less than or equal"),
        ({"data": {"upscale": "no"}}, "found data.upscale: expected true or false"),
        ({"data": {"resize_mode": "explode"}}, "does not know a setting of the server (found resize_mode: expected"),
        ({"prompt_embeds_width": 1 << 30}, "found prompt_embeds_width: expected less than or equal to 65536"),
        ({"prompt_embeds_width": True}, "found prompt_embeds_width: expected an integer"),
        ({"model": "x" * 1001}, "found model: String should have at most 1000 characters"),
        ({"recipe_id": "../../x"}, "found recipe_id: String should match pattern"),
        ({"recipe": {**RECIPE, "dtype": "float32"}}, "a model that this version does not know"),
        ({"recipe": {"x": "\ud800"}}, "a model that this version does not know"),
        ({"recipe": {"x": float("inf")}}, "a model that this version does not know"),
        ({"recipe": {}, "recipe_id": recipe_id({})}, "a model that this version does not know"),
        ({"model": "\x1b]0;mine\x07\x9b2J\u202e"}, r"\x1b]0;mine\x07\x9b2J\u202e"),
    ],
)
def test_what_a_server_says_of_itself_has_types_and_bounds(
    changed: dict[str, Any], message: str, pairs: Path, tmp_path: Path
) -> None:
    (pairs / "target_images" / "cat.png").write_bytes(b"")  # a problem, so that nothing is sent
    with serving(Encoders(**changed)) as server:
        refused(run("qwen-cache", "build", pairs, "--at", server.url, "--out", tmp_path / "out"), message)
    assert server.asked == ["GET /v1"]


def test_another_sample_than_the_one_asked_for_is_refused(pairs: Path, tmp_path: Path) -> None:
    """From a false server, or a proxy that caches."""
    with serving(Encoders()) as server, Client(server.url) as client:
        assert client.fetch(server.key).key == server.key
        wrong = rf"another sample than the one that was asked for \(expected {'0' * 32}, found {server.key}\)"
        with pytest.raises(QwenCacheError, match=rf"^{server.url}: the server sent {wrong}\n  → look for a proxy"):
            client.fetch("0" * 32)
        with pytest.raises(
            QwenCacheError, match=rf"^{server.url}: the server sent the sample of another row \(found {server.key}\)"
        ):
            client.encode("make it red", target=b"an image")
        result = run("qwen-cache", "build", pairs, "--at", server.url, "--out", tmp_path / "out")
        refused(result, server.url, "the server sent another sample", f"found {server.key}")


@pytest.mark.parametrize(
    "value",
    [
        {"samples": []},
        {"samples": [{"key": "../../../etc/passwd"}]},
        {"samples": [{"key": "0" * 32 + "\n"}]},
        {"samples": [{"key": 1}]},
        {"samples": [{}]},
        {"samples": [{"key": "0" * 32}] * 1001},
        {"samples": None},
        [],
    ],
    ids=str,
)
def test_keys_of_a_row_are_one_to_a_thousand_hashes(value: object) -> None:
    says = r": this is no server of qwen-cache, or of another version \(found "
    with (
        serving(Encoders(**{f"POST {SAMPLES}": as_json(value, 202)})) as server,
        Client(server.url) as client,
        pytest.raises(ConfigError, match=says),
    ):
        client.encode("make it red", target=b"an image")
    assert server.asked == [f"POST {SAMPLES}"]


@pytest.mark.parametrize("lengths", [[1, 2], [0], [-1], [1 << 31], ["1"], [True]])
def test_lengths_of_prompts_are_as_many_numbers(lengths: list[object]) -> None:
    with (
        serving(Encoders(**{"POST /v1/lengths": as_json({"lengths": lengths})})) as server,
        Client(server.url) as client,
        pytest.raises(QwenCacheError, match=r"another (number|version)"),
    ):
        client.lengths([("a prompt", [])])


BRACKETS = b"[" * 1_000_000
LARGE: dict[str, tuple[str, Callable[[], Answer], str]] = {
    "endless description": ("GET /v1", lambda: endless(b" " * 65_536), "expected at most 1048576 bytes, found more"),
    "huge description": (
        "GET /v1",
        lambda: endless(**{"Content-Length": str(1 << 40)}),
        f"expected at most 1048576 bytes, found {1 << 40}",
    ),
    "brackets": ("GET /v1", lambda: as_json(BRACKETS), "found an answer that is not JSON"),
    "nested": (
        "GET /v1",
        lambda: as_json(b'{"recipe":' + b"[" * 200 + b"]" * 200 + b"}"),
        "an answer that is not JSON",
    ),
    "compressed description": (
        "GET /v1",
        lambda: as_json(10 * gzip.compress(bytes(25_000_000), 1), **{"Content-Encoding": "gzip"}),
        "expected at most 1048576 bytes",
    ),
    "compressed, small": (
        "GET /v1",
        lambda: as_json(gzip.compress(bytes(1_000_000)), **{"Content-Encoding": "gzip"}),
        "the server compresses what must be sent as it is (found Content-Encoding: gzip)",
    ),
    "compressed sample": (
        f"GET {SAMPLES}",
        lambda: as_json(gzip.compress(bytes(1_000_000)), **{"Content-Encoding": "gzip"}),
        "the server compresses what must be sent as it is (found Content-Encoding: gzip)",
    ),
    "endless sample": (f"GET {SAMPLES}", endless, "the answer of the server is too large (expected at most 32"),
    "huge sample": (f"GET {SAMPLES}", lambda: endless(**{"Content-Length": str(1 << 40)}), f"found {1 << 40}"),
    "endless refusal": (f"GET {SAMPLES}", lambda: (500, {}, endless()[2]), "expected at most 1048576 bytes"),
    "endless keys": (f"POST {SAMPLES}", lambda: (202, {}, endless()[2]), "expected at most 1048576 bytes"),
}


@pytest.mark.parametrize("what", LARGE)
def test_an_answer_that_is_too_large_is_not_read(what: str, pairs: Path, tmp_path: Path) -> None:
    """Nor unpacked, nor taken apart where it is nested too deeply."""
    place, answer, message = LARGE[what]
    unknown = {f"GET {SAMPLES}": as_json({"error": "unknown", "do": ""}, 404)}
    with serving(Encoders(**{**unknown, place: answer()})) as server:
        refused(run("qwen-cache", "build", pairs, "--at", server.url, "--out", tmp_path / "out"), message)
    each = 0 if "huge" in what else 35_000_000
    assert server.sent < 4 * (each + BUFFERS)  # for four pairs


@pytest.mark.parametrize("what", ["slow", "not at all"])
def test_a_row_may_take_long_to_send_while_the_server_reads(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that takes longer than the limit for all of it is not silence; a server that reads nothing is."""
    monkeypatch.setattr(connection, "WAIT", 0)
    monkeypatch.setattr(bounds, "SILENCE", 2.0)
    row = {"prompt": "make it red"}, [("target", bytes(40_000_000))]
    ended = Event()
    with serving(Encoders()) as server, Client(server.url, patience=0) as client:
        server.before_read = lambda: ended.wait(0.1 if what == "slow" else None)
        if what == "slow":
            assert client.send(*row) == [server.key]
        else:
            with pytest.raises(ServerSilentError, match=r"\(found no answer for 2 seconds, or less than 10000 bytes a"):
                client.send(*row)
        ended.set()


def test_a_redirect_is_not_followed() -> None:
    """A redirect would take the row and the token elsewhere."""
    with serving(Encoders()) as other:
        away = as_json({}, 307, Location=f"{other.url}{SAMPLES}")
        with (
            serving(Encoders(**{f"POST {SAMPLES}": away})) as server,
            Client(server.url, "secret") as client,
            pytest.raises(QwenCacheError, match=r"refuses a request \(found status 307: status 307\)"),
        ):
            client.encode("make it red", target=b"an image")
    assert other.asked == []


@pytest.mark.parametrize("address", ["ftp://x", "http://", "http://[", "http://x:99999", "/tmp/x"])
def test_an_address_of_no_server_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"no address of a server \(found .*\)\n  → write http://HOST:PORT"):
        Client(address)
    with pytest.raises(ConfigError, match=r"^x: a token and a user for one server\n  → leave the user out"):
        Client("http://me:secret@x", token="a token")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long clients would wait between requests, in seconds; they do not."""
    waited: list[float] = []
    monkeypatch.setattr(Client, "_pause", lambda _, seconds: waited.append(seconds))
    return waited


BUSY = {"error": "busy"}


def fetched(*answers: Answer) -> list[str]:
    """The methods of the requests that fetch a sample, which the server sends after these answers."""
    server = Encoders()
    server.answers[f"GET {SAMPLES}"] = itertools.chain(answers, [as_json(server.file)])
    with serving(server), Client(server.url) as client:
        assert client.fetch(server.key, lambda: ({"prompt": "make it red"}, [])).key == server.key
    return [each.partition(" ")[0] for each in server.asked if SAMPLES in each]


@pytest.mark.parametrize("status", [202, 429, 502, 503, 504])
def test_a_busy_server_is_asked_again(status: int, pauses: list[float]) -> None:
    assert fetched(*[as_json(BUSY, status)] * 3) == ["GET"] * 4
    assert len(pauses) == 3


@pytest.mark.parametrize("status", [400, 403, 500])
def test_a_server_that_refuses_is_not_asked_again(status: int, pauses: list[float]) -> None:
    with pytest.raises(QwenCacheError, match=rf"the server refuses a request \(found status {status}: busy\)"):
        fetched(as_json(BUSY, status))
    assert pauses == []


def test_pauses_double_up_to_ten_seconds_and_a_server_may_ask_for_as_long(pauses: list[float]) -> None:
    fetched(*(as_json(BUSY, 503, **{"Retry-After": seconds}) for seconds in ("5", "0", "0", "60", "0", "0", "0")))
    assert pauses == [5, 0.8, 1.6, 10, 6.4, 10, 10]


def test_a_row_whose_sample_the_server_has_dropped_is_sent_again(pauses: list[float]) -> None:
    unknown = as_json({"error": "unknown"}, 404)
    assert fetched(unknown, unknown) == ["GET", "POST", "GET", "POST", "GET"]
    with pytest.raises(QwenCacheError, match="the server does not have this sample"):
        fetched(*[unknown] * 10)


def test_another_key_for_a_row_is_refused() -> None:
    other = as_json({"samples": [{"key": "0" * 32}]}, 202)
    unknown = as_json({"error": "unknown"}, 404)
    with (
        serving(Encoders(**{f"POST {SAMPLES}": other, f"GET {SAMPLES}": unknown})) as server,
        Client(server.url) as one,
    ):
        says = rf"another key for this row \(expected {server.key}, found {'0' * 32}\)"
        with pytest.raises(QwenCacheError, match=says):
            one.fetch(server.key, lambda: ({"prompt": "make it red"}, []))


FULL = {"error": "No space left on device\x1b[2J", "do": "wait", "code": "storage_full"}


def test_a_server_without_room_is_waited_for_as_long_as_it_says_so(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a message each minute, and never for as long at a time as a server may wish."""
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(client_module, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(client_module, "EVERY", 0.0)
    full = itertools.repeat(as_json(FULL, 503, **{"Retry-After": "9" * 400}))
    description = itertools.chain(itertools.islice(full, 3), [as_json(DESCRIPTION)])
    with serving(Encoders(**{"GET /v1": description})) as server:
        says = run("qwen-cache", "build", pairs, "--at", server.url, "--out", tmp_path / "out").stderr
    line = rf"{server.url} has no room on its disk: No space left on device\\x1b\[2J; waiting \(\d\.\d s\)\n"
    assert len(re.findall(line, says)) == 3, says
    assert "the server sent another sample" in says


def test_one_message_a_minute_is_for_all_threads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Closing the client, as Ctrl-C does, ends all of them."""
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.001)
    full = as_json(FULL, 503, **{"Retry-After": "0"})
    with serving(Encoders(**{f"GET {SAMPLES}": full})) as server, ThreadPoolExecutor(4) as threads:
        with Client(server.url, patience=0) as client:
            waiting = [threads.submit(client.fetch, server.key) for _ in range(4)]
            wait_until(lambda: len(server.asked) > 12)
        for each in waiting:
            with pytest.raises(QwenCacheError, match="the client was closed while it waited"):
                each.result()
    assert capsys.readouterr().err.count("has no room on its disk") == 1


def test_a_server_without_memory_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LONGEST_PAUSE", 0.1)
    refusal = as_json({**FULL, "error": "too little memory", "code": "out_of_memory"}, 503, **{"Retry-After": "0"})
    answers = itertools.chain(itertools.repeat(refusal, 100), [as_json({})])
    says = r"did not answer within 0\.5 seconds \(found too little memory\)\n  → look at its log"
    with (
        serving(Encoders(**{f"GET {SAMPLES}": answers})) as server,
        Client(server.url, patience=0.5) as client,
        pytest.raises(ServerSilentError, match=says),
    ):
        client.fetch(server.key)
    assert len(server.asked) > 1
