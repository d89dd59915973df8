"""Text from outside stays text: no name, prompt or message of a library can move the cursor or fake a line.

The judge is Unicode's own data: categories and bidirectional classes of what the commands print.
"""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen_cache import QwenCacheError, open_cache
from qwen_cache.errors import Problem
from qwen_cache.format.manifest import with_checksum
from qwen_cache.terminal import PlainStream, console, counting

from .support.caches import build
from .support.commands import Result, command, run
from .support.marks import slow
from .support.paths import ROOT, load_tool

examples: Any = load_tool("make_examples")

HOSTILE = "e\x1b]0;pwned\x07\x1b[2J\u202e\x9b31m\u2028\nerror: faked [red]x :bomb:"
SHOWN = r"e\x1b]0;pwned\x07\x1b[2J\u202e\x9b31m\u2028\nerror: faked [red]x :bomb:"
"""HOSTILE as a terminal shows it; each backslash is one."""
BIDIRECTIONAL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
MARKS = "\u200e\u200f\u061c"


def controls(text: str) -> list[str]:
    """The characters of an output that are not text, line breaks apart."""
    return [
        each
        for each in text
        if (unicodedata.category(each) in ("Cc", "Cs", "Zl", "Zp") and each != "\n")
        or unicodedata.bidirectional(each) in BIDIRECTIONAL
        or each in MARKS
    ]


def without_spaces(text: str) -> str:
    return "".join(text.split())


def assert_shown(result: Result, *, code: int) -> None:
    """The name is shown, whole and as text; tables may break its lines."""
    output = result.stdout + result.stderr
    assert result.code == code, output
    assert "Traceback" not in output
    assert controls(output) == []
    assert without_spaces(SHOWN) in without_spaces(output)
    assert not [line for line in output.splitlines() if line.startswith("error: faked")]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache whose recipe, sample and prompt have hostile names."""
    commit = examples.commit_update
    named = {"commit_update": lambda *a: commit(*a[:2], {HOSTILE: a[2]["default"]}, *a[3:])}
    monkeypatch.setattr(examples, "commit_update", named["commit_update"])
    sample = examples.make(HOSTILE, f"{HOSTILE} [/] at night", (1, 1), (1, 2), prefix=2)
    examples.write_cache(tmp_path / "shards", 2, [sample], 1)
    return tmp_path / "shards"


# ---- every command that prints them ----------------------------------------------------------------------------------


def test_inspect(cache: Path) -> None:
    assert_shown(run("qwen-cache", "inspect", cache), code=0)
    assert_shown(run("qwen-cache", "inspect", cache, "--scan"), code=0)
    assert_shown(run("qwen-cache", "inspect", cache, "--sample", HOSTILE), code=0)
    assert_shown(run("qwen-cache", "inspect", cache, "--sample", HOSTILE + "?"), code=2)


def test_json_is_equal_after_parsing(cache: Path) -> None:
    result = run("qwen-cache", "inspect", cache, "--sample", HOSTILE, "--json")
    assert controls(result.stdout) == []
    assert (
        json.loads(result.stdout)["name"]
        == json.loads(result.stdout)["prompt"].removesuffix(" [/] at night")
        == HOSTILE
    )
    overview = run("qwen-cache", "inspect", cache, "--json")
    assert controls(overview.stdout) == []
    assert list(json.loads(overview.stdout)["recipes"]) == [HOSTILE]


def test_verify_of_a_hostile_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    examples.write_cache(folder, 2, [examples.EDIT], 1)
    manifest = json.loads((folder / "cache.json").read_text(encoding="utf-8"))
    manifest["shards"][0]["name"] = HOSTILE
    (folder / "cache.json").write_bytes(with_checksum(manifest))
    assert_shown(command("qwen-cache", "verify", folder, fresh=False), code=1)
    for name, *options in (["inspect"], ["gc"], ["merge", "--out", tmp_path / "x"], ["migrate", "v2", "v1"]):
        arguments = [*options, folder] if name == "migrate" else [folder, *options]
        assert_shown(run("qwen-cache", name, *arguments), code=2)
    finding = json.loads(run("qwen-cache", "verify", folder, "--json").stdout)["findings"][0]
    assert HOSTILE in finding["what"]


def test_commands_that_remove_or_copy_files(cache: Path, tmp_path: Path) -> None:
    (cache / f".{HOSTILE}.tmp").write_text("left")
    assert_shown(run("qwen-cache", "gc", cache, "--dry-run"), code=0)
    assert controls(run("qwen-cache", "gc", cache, "--dry-run", "--json").stdout) == []
    out = tmp_path / HOSTILE
    assert_shown(run("qwen-cache", "merge", cache, "--out", out), code=0)
    assert_shown(run("qwen-cache", "merge", cache, "--out", out), code=0)
    assert_shown(run("qwen-cache", "verify", out), code=0)
    assert_shown(run("qwen-cache", "inspect", out, "--html", out.with_suffix(".html")), code=0)
    assert_shown(run("qwen-cache", "migrate", "v2", "v1", out, "--set", "cache.thumbnails=false"), code=0)
    assert_shown(run("qwen-cache", "merge", out, "--out", tmp_path / "new", "--select", HOSTILE + "?"), code=2)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("qwen-cache", ["verify", HOSTILE]),
        ("qwen-cache", ["verify", "one", HOSTILE]),
        ("qwen-cache", ["verify", f"--{HOSTILE}"]),
        ("qwen-cache", [HOSTILE]),
        ("qwen-cache", ["doctor", "--path", f"x://{HOSTILE}"]),
        ("qwen-cache", ["migrate", "v1", HOSTILE]),
        ("qwen-cache", ["build", "data", "--config", HOSTILE]),
        slow("qwen-cache", ["import", "qflux", HOSTILE, "--out", "x", "--model", "Qwen/Qwen-Image-Edit-2509"]),
        slow("qwen-cache", ["ground", "--image", HOSTILE, "--phrase", "x"]),
        slow("qwen-train", ["report", HOSTILE]),
        slow("qwen-train", ["export", HOSTILE, "--to", "comfyui", "--out", "x.safetensors"]),
        slow("qwen-train", ["predict", "--prompt", "x", "--lora", HOSTILE]),
        ("qwen-train", ["plan", "--gpu-memory", HOSTILE]),
    ],
)
def test_arguments_that_a_shell_took_from_outside(
    program: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments as those of `qwen-cache verify *`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    result = run(program, *arguments)
    assert result.code == 2, result.stderr
    assert controls(result.stderr) == []
    assert "Traceback" not in result.stderr
    assert without_spaces(SHOWN) in without_spaces(result.stderr.replace(r"\x0a", r"\n"))


@pytest.mark.slow
def test_problems_of_a_source(pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    (pairs / "target_images" / f"{HOSTILE.replace('/', '')}.png").write_bytes(HOSTILE.encode())
    result = build(pairs, tmp_path / "shards", tiny_model("edit-plus"), "--dry-run")
    assert "problem" in result.stderr
    assert controls(result.stderr) == []
    assert SHOWN in result.stderr
    result = build(pairs, tmp_path / "shards", tiny_model("edit-plus"), "--dry-run", "--json")
    assert controls(result.stdout) == []
    assert HOSTILE in "".join(each["where"] for each in json.loads(result.stdout)["problems"])


@pytest.mark.slow
def test_reasons_of_a_build_and_images_of_a_cache(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    name, shown = HOSTILE, SHOWN
    for path in [*pairs.rglob("cup*")]:
        path.rename(path.with_name(path.name.replace("cup", name)))
    folder, model = tmp_path / "shards", tiny_model("edit-plus")
    assert build(pairs, folder, model).code == 0
    (pairs / "target_images" / f"{name}.txt").write_text(f"another {HOSTILE}", encoding="utf-8")
    result = build(pairs, folder, model)
    assert result.code == 0
    assert f"{shown}: prompt" in result.stderr
    assert controls(result.stderr) == []
    out = tmp_path / name / "out.png"
    result = run("qwen-train", "predict", "--from-cache", folder, "--key", name, "--model", model, "--out", out,
                 "--set", "predict.num_inference_steps=2")  # fmt: skip
    assert result.code == 0, result.stderr
    assert shown in result.stderr
    assert controls(result.stderr) == []


# ---- messages --------------------------------------------------------------------------------------------------------


def test_a_long_name_loses_its_middle_in_a_message_and_not_in_json(tmp_path: Path) -> None:
    name = "begin" + "x" * 1_000_000 + "end"
    error = QwenCacheError(f"{name} is wrong", where=name, found=name, do=name)
    assert len(str(error)) < 9_000
    assert str(error).startswith("beginxxx")
    assert str(error).endswith("xxxend")
    assert str(error).count(" … 998008 characters … ") == 3
    assert len(str(Problem(name, name, name))) < 7_000
    assert error.where == name
    folder = tmp_path / "shards"
    examples.write_cache(folder, 2, [examples.EDIT], 1)
    manifest = json.loads((folder / "cache.json").read_text(encoding="utf-8"))
    manifest["shards"][0]["name"] = name
    (folder / "cache.json").write_bytes(with_checksum(manifest))
    assert name in json.loads(run("qwen-cache", "verify", folder, "--json").stdout)["findings"][0]["what"]
    assert len(run("qwen-cache", "verify", folder).stderr) < 9_000


def test_the_message_of_a_library_is_one_line() -> None:
    error = QwenCacheError("not YAML: a list\n   in line 1\r\n\n end", found="a\nname", do="do\nthis")
    assert str(error) == "not YAML: a list in line 1 end (found a\\nname)\n  → do this"


def test_long_runs_of_spaces_and_returns_take_no_longer_than_other_text() -> None:
    spaces, returns = " " * 1_000_000, "a" + "\r" * 1_000_000 + "b"  # hours where time grows with the square
    assert str(QwenCacheError(f"unknown key {spaces}", found="x")).endswith(" (found x)")
    stream = PlainStream(io.StringIO())
    assert stream.write(returns) == len(returns)
    assert stream.getvalue() == "a" + r"\r" * 1_000_000 + "b"


# ---- what is not ours ------------------------------------------------------------------------------------------------

OTHERS = """
import logging, sys, threading, warnings
from qwen_cache import options

hostile = sys.argv.pop()

@options.command(page="", examples=())
def fails():
    warnings.warn(hostile)
    logging.getLogger("library").warning(hostile)
    logging.basicConfig()
    logging.error(hostile)
    from tqdm import tqdm
    for _ in tqdm(range(2), desc=hostile.replace(chr(10), ""), mininterval=0):
        pass
    thread = threading.Thread(target=lambda: 1 / len([]) if not hostile else int(hostile))
    thread.start()
    thread.join()
    print(hostile)
    raise RuntimeError(hostile)

options.run_app(fails)
"""


def test_output_of_libraries_and_tracebacks() -> None:
    """Bytes that are not UTF-8 come as surrogates, as in the names of files."""
    done = subprocess.run(
        [sys.executable, "-c", OTHERS, os.fsencode(HOSTILE + "\udcff")], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert set(controls(done.stderr)) <= {"\r"}  # tqdm's
    assert controls(done.stdout) == []
    assert "RuntimeError: e\\x1b]0;pwned" in done.stderr
    assert "[red]x :bomb:\\udcff" in done.stderr
    assert done.stdout.startswith(r"e\x1b]0;pwned\x07\x1b[2J\u202e\x9b31m\u2028")


PROGRAM = Path(sys.executable).parent / "qwen-cache"


def on_a_terminal(*arguments: str | Path, **environment: str) -> str:
    """The output of a command of which stdout and stderr are a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        list(map(str, arguments)),
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "300", **environment},
    )
    os.close(theirs)
    data = b""
    while True:
        try:
            data += os.read(ours, 65_536)
        except OSError:  # the terminal is closed
            break
    process.wait()
    os.close(ours)
    return data.decode("utf-8")


def test_our_own_colours_reach_a_terminal(cache: Path) -> None:
    """And nothing of the name does."""
    shown = on_a_terminal(PROGRAM, "inspect", cache, "--scan")
    assert f"\x1b[1m{SHOWN}\x1b[0m" in shown
    assert "\x1b]0" not in shown
    assert "\x1b[2J" not in shown


@pytest.mark.slow
def test_colours_of_errors_usage_and_help() -> None:
    assert "\x1b[1;31merror:\x1b[0m" in on_a_terminal(PROGRAM, "verify", HOSTILE)
    usage = on_a_terminal(PROGRAM, "verify", "one", HOSTILE)
    assert r"\x1b]0;pwned" in usage
    assert "\x1b]0" not in usage
    assert r"\x1b" not in on_a_terminal(PROGRAM, "--help")


# ---- quiet and verbose -----------------------------------------------------------------------------------------------


def test_quiet_prints_only_errors_and_results(cache: Path, tmp_path: Path) -> None:
    assert run("qwen-cache", "verify", cache, "--quiet") == Result(0, "", "")
    assert run("qwen-cache", "merge", cache, "--out", tmp_path / "merged", "-q") == Result(0, "", "")
    assert run("qwen-cache", "inspect", cache, "-q").stdout == run("qwen-cache", "inspect", cache).stdout != ""
    (cache / ".left.tmp").write_text("left")
    assert ".left.tmp  4 B\n" in run("qwen-cache", "gc", cache, "--dry-run", "-q").stderr
    (shard,) = cache.glob("*.tar")
    shard.write_bytes(bytes(shard.stat().st_size))
    assert "fault" in run("qwen-cache", "verify", cache, "-q").stderr
    missing = run("qwen-cache", "verify", tmp_path / "missing", "-q").stderr
    assert missing.startswith(f"error: {tmp_path / 'missing'}")
    loud = run("qwen-cache", "verify", tmp_path / "missing").stderr
    assert loud.endswith(missing)
    assert loud != missing, "quiet ends with the command"


def test_verbose_prints_tracebacks_and_the_time(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DIFFUSERS_VERBOSITY", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(name, "error")
    monkeypatch.setattr("logging.basicConfig", lambda level: None)
    assert re.search(r"^took .+ s, .+ s of CPU time$", run("qwen-cache", "gc", cache, "-v").stderr, re.MULTILINE)
    assert os.environ["DIFFUSERS_VERBOSITY"] == os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    failed = run("qwen-cache", "verify", tmp_path / "missing", "-v").stderr
    assert "Traceback (most recent call last)" in failed
    assert f"\nerror: {tmp_path / 'missing'}" in failed


# ---- one place -------------------------------------------------------------------------------------------------------

WRITERS = {
    "qwen_cache/terminal.py": {"print", "Console"},
    "qwen_cache/cli/serve.py": {"print"},  # its address to the trainer, through a pipe
    "qwen_cache/service/app.py": {"print"},  # a line of JSON for each event
    "qwen_train/data/served.py": {"print"},  # a token to the worker, through a pipe
}


CALLED = ("sys.stdout.write", "sys.stderr.write", "typer.echo", "typer.secho", "warnings.warn")
WRITE = {name.rpartition(".")[2] for name in CALLED}


def test_all_output_goes_through_one_place() -> None:
    """Nothing else writes to a terminal: `console()` and `results()` do, and `print_json` for other programs."""
    writers: dict[str, set[str]] = {}
    may_write = re.compile("|".join(map(re.escape, ("Console", "print(", *CALLED))))
    for path in [*(ROOT / "qwen_cache").rglob("*.py"), *(ROOT / "qwen_train").rglob("*.py")]:
        if not may_write.search(text := path.read_text(encoding="utf-8")):
            continue
        for node in ast.walk(ast.parse(text)):
            found = name_of_writer(node)
            if found:
                writers.setdefault(path.relative_to(ROOT).as_posix(), set()).add(found)
    assert writers == WRITERS


def name_of_writer(node: ast.AST) -> str | None:
    if isinstance(node, ast.ImportFrom) and node.module == "rich.console":
        return next((each.name for each in node.names if each.name == "Console"), None)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
        return "print"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITE:
        called = ast.unparse(node.func)
        if called in CALLED:
            return called
    return None


def test_what_a_message_forgets_is_caught_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(f"one\n{HOSTILE}", markup=False)
    with counting(HOSTILE, total=1):
        pass
    assert controls(capsys.readouterr().err) == []


def test_names_are_as_they_were_for_readers(cache: Path) -> None:
    """Only what people see is escaped."""
    assert open_cache(cache)[0].name == HOSTILE
