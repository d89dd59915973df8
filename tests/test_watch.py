"""`build --watch`: what is new is encoded as it comes, what is being written waits, and the encoders stay loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from qwen_cache import open_cache
from qwen_cache.encode import build as watch_command
from qwen_cache.encode import preflight
from qwen_cache.storage.files import locked

from .support.caches import build
from .support.commands import Result, run
from .support.fake_lanes import FakeLanes
from .support.serving import running, service_job

Step = Callable[[], object]


class Watched:
    """`build --watch` on the pairs; each step runs between two looks, and a Ctrl-C ends the last wait."""

    def __init__(self, source: Path, out: Path, model: Path, lanes: list[FakeLanes], patch: pytest.MonkeyPatch) -> None:
        self.source, self.out, self.model, self.lanes, self._patch = source, out, model, lanes, patch

    def __call__(self, *steps: Step, options: Sequence[str] = ()) -> Result:
        left: Iterator[Step] = iter(steps)

        def sleep(seconds: float) -> None:
            try:
                next(left)()
            except StopIteration:
                raise KeyboardInterrupt from None

        self._patch.setattr(watch_command.time, "sleep", sleep)
        if "--at" in options:
            return run("qwen-cache", "build", self.source, "--out", self.out, "--watch", "5", *options)
        return build(self.source, self.out, self.model, "--watch", "5", *options)

    def names(self) -> list[str]:
        return sorted(sample.name for sample in open_cache(self.out))

    def encoded(self) -> list[str]:
        return [name for lanes in self.lanes for name in lanes.encoded]

    def prompt(self, name: str) -> Path:
        return self.source / "target_images" / f"{name}.txt"

    def add(self, name: str) -> None:
        """A row without its prompt."""
        for folder in ("target_images", "control_images"):
            shutil.copy(self.source / folder / "cat.png", self.source / folder / f"{name}.png")


def nothing() -> None:
    """Another look."""


@pytest.fixture
def watched(
    pairs: Path,
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    fast: list[FakeLanes],
    monkeypatch: pytest.MonkeyPatch,
) -> Watched:
    monkeypatch.setattr(preflight, "load_lanes", lambda job: fast.append(FakeLanes(job)) or fast[-1])  # type: ignore[func-returns-value]
    return Watched(pairs, tmp_path / "shards", tiny_model("edit-plus"), fast, monkeypatch)


def test_what_is_new_is_encoded_once_it_rests(watched: Watched) -> None:
    """A row in parts, a prompt that is typed, and a row that goes; by encoders that were loaded once."""
    four = ["cat", "china", "cup", "flower"]
    states: list[list[str]] = []

    def note() -> None:
        states.append(watched.names())

    result = watched(
        nothing,
        note,
        lambda: watched.add("late"),
        lambda: (note(), watched.prompt("late").write_text("a", encoding="utf-8")),
        lambda: (note(), watched.prompt("late").write_text("a late row", encoding="utf-8")),
        note,
        note,
        lambda: watched.prompt("cup").with_suffix(".png").unlink(),
        lambda: (watched.prompt("cup").unlink(), (watched.source / "control_images" / "cup.png").unlink()),
        lambda: (watched.source / "control_images" / "cup_mask.png").unlink(),
        nothing,
        nothing,
    )
    assert result.code == 0, result.stderr
    assert states == [four, four, four, four, [*four, "late"]]
    assert watched.names() == ["cat", "china", "flower", "late"]
    assert sorted(watched.encoded()) == [*four, "late"]
    assert len(watched.lanes) == 1
    assert "stopped" in result.stderr
    assert "nothing to do" in build(watched.source, watched.out, watched.model).stderr


def test_a_row_with_another_name_is_listed_under_it(watched: Watched) -> None:
    """The change needs no encoder; a dry run says that there is work, as `build` then says."""

    def rename() -> None:
        for path in [*watched.source.rglob("cup*")]:
            path.rename(path.with_name(path.name.replace("cup", "mug")))

    assert watched(nothing, nothing).code == 0
    rename()
    check = ("--dry-run", "--check")
    assert build(watched.source, watched.out, watched.model, *check).code == 1
    assert watched(nothing, nothing, nothing).code == 0
    assert watched.names() == ["cat", "china", "flower", "mug"]
    assert len(watched.encoded()) == 4
    assert build(watched.source, watched.out, watched.model, *check).code == 0


def test_what_cannot_be_read_for_a_while_keeps_its_samples(watched: Watched) -> None:
    """An image that is written again in place, a disk that is not there, an empty folder, another writer."""
    image, away = watched.source / "target_images" / "cat.png", watched.source.with_name("away")
    whole = image.read_bytes()

    result = watched(
        nothing,
        lambda: image.write_bytes(whole[: len(whole) // 2]),
        nothing,
        nothing,
        lambda: image.write_bytes(whole),
        lambda: watched.source.rename(away),
        lambda: watched.source.mkdir(),
        nothing,
        lambda: (watched.source.rmdir(), away.rename(watched.source)),
        nothing,
        nothing,
    )
    assert result.code == 0, result.stderr
    assert watched.names() == ["cat", "china", "cup", "flower"] == sorted(watched.encoded())
    assert result.stderr.count("cat.png: the image is damaged or incomplete") == 1, result.stderr
    assert result.stderr.count("waiting: ") == 2, "each reason once"
    watched.add("late")
    watched.prompt("late").write_text("late", encoding="utf-8")
    with locked(watched.out / ".lock"):
        result = watched(nothing, nothing, nothing)
    assert result.stderr.count("another process is writing to this cache") == 1
    assert "late" not in watched.names()


def test_a_server_encodes_what_comes(watched: Watched, tmp_path: Path) -> None:
    with running(service_job(watched.model, tmp_path / "pool")) as url:
        assert watched(nothing, nothing, options=["--at", url]).code == 0
    assert watched.names() == ["cat", "china", "cup", "flower"]
    assert watched.encoded() == []


def test_what_needs_a_single_build_is_refused(pairs: Path, tmp_path: Path) -> None:
    for option in (["--dry-run"], ["--repair"], ["--json"], ["--ray", "local"], ["--slice", "1/2"]):
        result = run("qwen-cache", "build", pairs, "--out", tmp_path / "out", "--watch", "1", *option)
        assert result.code == 2
        assert "--watch does not go with" in result.stderr
    result = run("qwen-cache", "build", pairs, "--watch", "1", "--set", "validation.prompts=[{prompt: a cat}]")
    assert "--watch builds no validation cache" in result.stderr
