"""A plan reads an image once: again only when its file has changed, or with --rehash. A bucket is only listed."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from qwen_cache.encode.plan import RememberedImages, read_again
from qwen_cache.errors import SourceError
from qwen_cache.settings.sections import DataConfig
from qwen_cache.sources import arrow, webdataset
from qwen_cache.sources.places import File, open_folder
from qwen_cache.storage import remembered
from qwen_cache.storage import remembered as remembered_files
from qwen_cache.storage.remembered import RememberedFiles
from qwen_cache.storage.remote import Url, _version

from .support.caches import build
from .support.commands import run
from .support.fake_lanes import fake_lanes
from .support.server import BUCKET

TinyModel = Callable[[str], Path]


@pytest.fixture(autouse=True)
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stores of this test. Files count as settled at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remembered, "SETTLED_NS", -(10**13))
    return tmp_path / "home" / "qwen-cache" / "files"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of images that were read, whatever they were in."""
    names: list[str] = []
    for kind in (File, webdataset.Member, arrow.Cell):
        read = kind.read
        monkeypatch.setattr(kind, "read", lambda self, read=read: names.append(str(self)) or read(self))
    return names


class Planner:
    """Dry runs of one source, and the images that each read."""

    def __init__(self, source: str | Path, model: Path, reads: list[str], out: Path) -> None:
        self.source, self.model, self.reads, self.out = str(source), model, reads, out

    def __call__(self, *options: str) -> tuple[dict[str, Any], list[str]]:
        self.reads.clear()
        result = build(self.source, self.out, self.model, "--dry-run", "--json", *options)  # type: ignore[arg-type]
        plan = json.loads(result.stdout)
        assert result.code == (2 if plan["problems"] else 0), result.stderr
        del plan["bytes_free"]  # of the disk of this machine
        return plan, sorted(Path(name).name for name in self.reads if not name.endswith(".txt"))


@pytest.fixture
def planner(pairs: Path, tiny_model: TinyModel, reads: list[str], tmp_path: Path) -> Planner:
    return Planner(pairs, tiny_model("edit-plus"), reads, tmp_path / "shards")


ALL = sorted(
    ["cat.png", "cat.png", "cat_control_1.png", "china.png", "china.png", "cup.png", "cup.png", "cup_mask.png"]
)
ALL += ["flower.png", "flower.png"]


def sets(*assignments: str) -> list[str]:
    return [each for assignment in assignments for each in ("--set", assignment)]


def png(colour: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


# ---- on a disk -------------------------------------------------------------------------------------------------------


def test_unchanged_images_are_read_once(planner: Planner, pairs: Path) -> None:
    """Also before anything is cached: that they decode is remembered as well."""
    first, read = planner()
    assert (len(first["samples"]), read) == (4, ALL)
    assert planner() == (first, [])
    assert planner("--rehash") == (first, ALL)
    assert planner() == (first, [])
    elsewhere = Planner(shutil.copytree(pairs, pairs.with_name("copy")), planner.model, planner.reads, planner.out)
    again, read = elsewhere()
    assert read == ALL
    assert [sample["key"] for sample in again["samples"]] == [sample["key"] for sample in first["samples"]]


def test_a_cache_is_compared_with_a_source_that_is_only_looked_at(
    pairs: Path, built: Callable[..., Path], reads: list[str]
) -> None:
    cache = built("edit-plus")
    for options, count in (((), len(ALL)), ((), 0), (("--rehash",), len(ALL))):
        reads.clear()
        result = run("qwen-cache", "inspect", cache, "--source", pairs, "--json", *options)
        assert json.loads(result.stdout)["state"] == "complete"
        assert len(reads) == count
    result = run("qwen-cache", "inspect", cache, "--rehash")
    assert result.code == 2
    assert "--rehash goes with --source\n  → give --source SOURCE too" in result.stderr


def test_a_changed_image_is_read_again_and_no_other(planner: Planner, pairs: Path) -> None:
    """A file of the same size; a byte after its end changes no pixel."""
    target = pairs / "target_images" / "cat.png"
    data, times = target.read_bytes(), (10**18, 10**18)
    target.write_bytes(data + b"1")
    os.utime(target, ns=times)
    before = {sample["name"]: sample["key"] for sample in planner()[0]["samples"]}
    (pairs / "new").write_bytes(data + b"2")
    os.utime(pairs / "new", ns=times)
    os.replace(pairs / "new", target)
    plan, read = planner()
    assert read == ["cat.png"]
    assert [sample["name"] for sample in plan["samples"] if sample["key"] != before[sample["name"]]] == ["cat"]
    (pairs / "control_images" / "cat.png").unlink()
    assert "the control" in planner()[0]["problems"][0]["what"]


def test_an_image_with_a_problem_is_read_each_time(planner: Planner, pairs: Path) -> None:
    damaged = pairs / "control_images" / "cup_mask.png"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    for read in (ALL, ["cup_mask.png"], ["cup_mask.png"]):
        plan, found = planner()
        assert found == read
        assert "cup_mask.png: the image is damaged" in plan["problems"][0]["what"]


def test_an_image_that_was_just_written_is_not_remembered(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "SETTLED_NS", 10**15)
    assert [planner()[1] for _ in range(2)] == [ALL, ALL]


def test_an_image_that_changes_while_it_is_read_is_not_remembered(
    planner: Planner, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, target = File.read, pairs / "target_images" / "cat.png"
    with monkeypatch.context() as patch:

        def read_then_change(self: File) -> bytes:
            data = read(self)
            if self.path == target:
                target.write_bytes(data + b"another")
            return data

        patch.setattr(File, "read", read_then_change)
        planner()
    assert planner()[1] == ["cat.png"]


def test_a_link_that_leads_elsewhere_while_it_is_read_and_then_back_is_read_again(
    planner: Planner, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of the file that it leads to at last is the state before."""
    first, _ = planner()
    link, read = pairs / "target_images" / "cat.png", File.read
    old, new = link.rename(pairs / "old"), pairs / "new"
    new.write_bytes(png())

    def lead(to: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(to)

    lead(old)
    with monkeypatch.context() as patch:
        patch.setattr(File, "read", lambda self: (self.path == link and lead(new)) or read(self))
        assert planner()[0] != first
    lead(old)
    assert planner() == (first, ["cat.png"])


def test_a_repair_reads_its_images_and_the_next_plan_none(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_lanes(monkeypatch)
    assert build(planner.source, planner.out, planner.model, "--set", "cache.shard_size=80000").code == 0  # type: ignore[arg-type]
    assert planner()[0]["cached"] == 4
    next(planner.out.glob("*.tar")).unlink()
    plan, read = planner("--repair", "--set", "cache.shard_size=80000")
    assert 0 < len(read) < len(ALL)
    assert len(plan["samples"]) == 2
    assert planner("--set", "cache.shard_size=80000")[1] == []


def test_other_names_of_the_same_columns_are_other_images(planner: Planner, pairs: Path) -> None:
    """`data.columns` may give every file another role between two plans. An image is known as an image or a mask."""
    folders = [f"data.columns.{role}={role}_images" for role in ("target", "control")]
    swapped = ["data.columns.target=control_images", "data.columns.control=target_images"]
    prompts = "data.columns.prompt=prompts"
    (pairs / "prompts").mkdir()
    for path in (pairs / "target_images").glob("*.txt"):
        path.rename(pairs / "prompts" / path.name)
    for name in ("cat_control_1.png", "cup_mask.png"):
        (pairs / "control_images" / name).unlink()
    first, _ = planner(*sets(*folders, prompts))
    for names in (swapped, folders, swapped):
        plan, read = planner(*sets(*names, prompts))
        assert read == []
        assert (plan == first) == (names is folders)
        assert planner(*sets(*names, prompts), "--rehash")[0] == plan


def test_a_plan_that_is_interrupted_keeps_what_it_saw(
    planner: Planner, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = File.read
    with monkeypatch.context() as patch:

        def interrupt_at_last(self: File) -> bytes:
            if self.path == pairs / "target_images" / "flower.png":
                raise KeyboardInterrupt
            return read(self)

        patch.setattr(File, "read", interrupt_at_last)
        assert build(pairs, planner.out, planner.model, "--dry-run").code == 130
    assert planner()[1] == ["flower.png", "flower.png"]


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "another version", "too large"])
def test_a_store_that_is_not_right_is_ignored_and_written_again(
    damage: str, planner: Planner, stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = planner()
    (store,) = stores.iterdir()
    data = store.read_bytes()
    changed = {"empty": b"", "cut": data[:-1], "flipped": data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]}
    store.write_bytes(changed.get(damage, data.replace(b"images 2", b"images 1")))
    if damage == "too large":
        store.write_bytes(data)
        with monkeypatch.context() as patch:
            patch.setattr(remembered_files, "LIMIT", 100)
            assert planner() == (plan, ALL)
    else:
        assert planner() == (plan, ALL)
        assert planner() == (plan, [])


def test_without_a_folder_to_write_to_every_image_is_read(planner: Planner, stores: Path) -> None:
    stores.parent.mkdir(parents=True)
    stores.write_text("not a folder")
    assert [planner()[1] for _ in range(2)] == [ALL, ALL]


def test_processes_that_plan_at_the_same_time_leave_a_whole_store(tmp_path: Path) -> None:
    """The last one wins: it has seen the same files."""
    one, other = (RememberedFiles.of("test", tmp_path) for _ in range(2))
    with one.saved(), other.saved():
        for number in range(1000):
            one.keep(number.to_bytes(16), b"1")
            other.keep(number.to_bytes(16), b"1" * (number % 3))
    found = RememberedFiles.of("test", tmp_path)
    assert [found.recall(number.to_bytes(16)) for number in range(1000)] == [b"1"] * 1000


def test_all_stores_together_are_bounded(tmp_path: Path, stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that were not used for longest go first; those that a killed process left count."""
    monkeypatch.setattr(remembered_files, "LIMIT", 300)

    def use(name: str) -> None:
        memory = RememberedFiles.of("test", tmp_path / name)
        with memory.saved():
            memory.keep(bytes(16), bytes(60))

    for name, time in (("a", 1), ("b", 2)):
        use(name)
        for path in stores.iterdir():
            os.utime(path, (time, time)) if path.stat().st_mtime > 100 else None
    (stores / ".x.1.tmp").write_bytes(b"left over")
    os.utime(stores / ".x.1.tmp", (0, 0))
    use("a")
    assert len(list(stores.iterdir())) == 3, "nothing was written"
    use("c")
    assert len(list(stores.iterdir())) == 2
    assert RememberedFiles.of("test", tmp_path / "a").recall(bytes(16))
    assert RememberedFiles.of("test", tmp_path / "b").recall(bytes(16)) is None


def test_bytes_that_change_without_a_trace_are_refused(
    planner: Planner, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that a failing disk changes: where the file is read, its bytes count, and --rehash is named."""
    target = pairs / "target_images" / "cat.png"
    monkeypatch.setattr(remembered_files, "file_state", lambda path: [1, 2, 3, 4])
    planner()
    memory = RememberedImages.of(str(pairs), DataConfig(slice="1/1"))
    with memory.planning([]):
        image = memory.image(File(target))
        image.hash()
        image.keep()
    target.write_bytes(target.read_bytes() + b"1")
    assert planner()[1] == []
    found = r"cat\.png: the content of this file changed, but its times or ETag did not\n  → run .*; if the error p"
    with pytest.raises(SourceError, match=found):
        RememberedImages.of(str(pairs), DataConfig(slice="1/1")).image(File(target)).decode()
    with pytest.raises(SourceError, match=r"cat\.png: the file changed while .*\n  → build again; if the error p"):
        read_again(File(target), "0" * 32)


# ---- in a bucket -----------------------------------------------------------------------------------------------------


class Requests(logging.Handler):
    """The requests in the log of moto's server."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if match := re.search(r"(GET|HEAD) (\S+) HTTP", record.getMessage()):
            self.counts["LIST" if "list-type=" in match[2] else match[1]] += 1

    def taken(self) -> dict[str, int]:
        counts, self.counts = dict(self.counts), Counter()
        return counts


@pytest.fixture
def requests(s3: tuple[str, int]) -> Iterator[Requests]:
    log, handler = logging.getLogger("werkzeug"), Requests()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


def upload(folder: Path) -> str:
    files = fsspec.filesystem("s3")
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"{BUCKET}/{folder.parent.name}/{path.relative_to(folder)}", path.read_bytes())
    return f"s3://{BUCKET}/{folder.parent.name}"


def test_an_unchanged_folder_in_a_bucket_is_only_listed(planner: Planner, pairs: Path, requests: Requests) -> None:
    planner.source = upload(pairs)
    requests.taken()
    plan, read = planner()
    assert (read, requests.taken()) == (ALL, {"LIST": 1, "GET": len(ALL) + 4})
    assert planner() == (plan, [])
    assert requests.taken() == {"LIST": 1}
    files = fsspec.filesystem("s3")
    target = f"{BUCKET}/{pairs.parent.name}/target_images/cat"
    files.pipe_file(f"{target}.png", (pairs / "target_images" / "cat.png").read_bytes() + b"1")
    files.pipe_file(f"{target}.txt", b"another prompt")
    requests.taken()
    changed, read = planner()
    assert (read, requests.taken()) == (["cat.png"], {"LIST": 1, "GET": 2})
    assert [one["name"] for one, two in zip(changed["samples"], plan["samples"], strict=True) if one != two] == ["cat"]


def test_a_table_in_a_bucket_is_read_and_its_images_are_listed_or_asked_for(
    planner: Planner, tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table").mkdir()
    rows = [json.dumps({"image": f"{i}.png", "control": "c.png", "prompt": "red"}) for i in range(3)]
    (tmp_path / "table" / "metadata.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for i, name in enumerate(["0", "1", "2", "c"]):
        (tmp_path / "table" / f"{name}.png").write_bytes(png(i))
    planner.source = upload(tmp_path / "table") + "/metadata.jsonl"
    requests.taken()
    plan, read = planner()
    assert (read, requests.taken()) == (["0.png", "1.png", "2.png", *["c.png"] * 3], {"HEAD": 4, "GET": 7})
    assert planner() == (plan, [])
    assert requests.taken() == {"HEAD": 4, "GET": 1}
    monkeypatch.setattr(remembered_files, "LISTED", 4)
    planner()
    assert requests.taken() == {"LIST": 1, "GET": 1}


def test_what_a_server_says_of_a_file_counts_as_its_version_only_if_it_is_one() -> None:
    assert _version({"size": 3, "ETag": '"a"', "LastModified": "today"}) == '3|"a"|today'
    assert _version({"size": 3, "generation": "17", "etag": "x"}) == "3|17|x"
    assert _version({"size": 3, "blob_id": "b", "lfs": None, "last_commit": None}) == "3|b"
    assert _version({"size": 3, "ETag": 'W/"a"', "Last-Modified": "today"}) == ""
    assert _version({"size": 3, "created": "today"}) == ""


def test_a_listing_stays_in_its_process(pairs: Path, requests: Requests) -> None:
    import pickle

    folder = open_folder(Url(upload(pairs)))
    assert isinstance(folder.path, Url)
    image = folder.path / "target_images" / "cat.png"
    assert image.listed
    sent = pickle.loads(pickle.dumps(image))
    assert (sent, sent.listed) == (image, "")


# ---- in tars and tables ----------------------------------------------------------------------------------------------


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    import tarfile

    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("remote", [False, True])
def test_an_unchanged_tar_is_not_opened(remote: bool, planner: Planner, tmp_path: Path, requests: Requests) -> None:
    members = {f"{i}{name}": png(i) for i in range(2) for name in (".png", ".control.png")}
    (tmp_path / "tars").mkdir()
    path = write_tar(tmp_path / "tars" / "a.tar", members | {"0.txt": b"red", "1.txt": b"blue"})
    planner.source = upload(path.parent) if remote else str(path)
    first, _ = planner()
    requests.taken()
    planner.reads.clear()
    assert planner() == (first, [])
    assert planner.reads == [], "no prompt either"
    assert requests.taken() == ({"LIST": 1} if remote else {})
    write_tar(path, members | {"0.txt": b"tan", "1.txt": b"blue"})
    planner.source = upload(path.parent) if remote else str(path)
    changed, read = planner()
    assert len(read) == 4
    assert [sample["key"] for sample in changed["samples"]][1:] == [sample["key"] for sample in first["samples"]][1:]
    assert changed["samples"][0]["key"] != first["samples"][0]["key"]


def test_unchanged_cells_are_not_read_and_files_that_cells_name_are_looked_at(planner: Planner, tmp_path: Path) -> None:
    """A column with an image in a file of its own depends on that file too."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(png(ord(name)) + b"1")
    inside = [{"bytes": png(i), "path": "there is no such file.png"} for i in range(2)]
    outside = [{"bytes": None, "path": f"{name}.png"} for name in ("a", "b")]
    columns = {"image": inside, "control": outside, "prompt": ["red", "blue"]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    planner.source = str(tmp_path / "t.parquet")
    first, read = planner()
    assert read == ["t.parquet[0].control", "t.parquet[0].image", "t.parquet[1].control", "t.parquet[1].image"]
    assert planner() == (first, [])
    (tmp_path / "b.png").write_bytes(png(ord("b")) + b"2")
    assert planner()[1] == ["t.parquet[1].control"]
    pq.write_table(pa.table({**columns, "prompt": ["red", "green"]}), tmp_path / "t.parquet")
    assert len(planner()[1]) == 4


def test_a_cell_without_an_image_does_not_make_the_others_depend_on_files(planner: Planner, tmp_path: Path) -> None:
    """Also in lists, which may be shorter, and with a column whose name is that of an item."""
    cells = [{"bytes": png(i), "path": "there is no such file.png"} for i in range(6)]
    some, lists = [cells[1], None, cells[2]], [[cells[1]], [cells[2], cells[3]], [cells[4], None]]
    columns = {"image": cells[:3], "some": some, "many": lists, "many[0]": cells[3:], "prompt": list("abc")}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=2)
    planner.source = str(tmp_path / "t.parquet")
    plans = {}
    for control, count in (('["many[0]", "some"]', 8), ("many", 4)):
        named = sets(f"data.columns.control={control}")
        plans[control], read = planner(*named)
        assert len(read) == count
        assert planner(*named) == (plans[control], [])
    keys = [{sample["key"] for sample in plan["samples"]} for plan in plans.values()]
    assert not keys[0] & keys[1]
    outside = tmp_path / "outside.png"
    outside.write_bytes(png(7))
    mixed = [{"bytes": png(8), "path": None}, {"bytes": None, "path": outside.name}, None]
    pq.write_table(pa.table({**columns, "mixed": mixed}), tmp_path / "t.parquet")
    named = sets('data.columns.control=["many[0]", "mixed"]')
    first, _ = planner(*named)
    assert planner(*named) == (first, [])
    outside.write_bytes(png(9))
    changed, read = planner(*named)
    assert read == ["t.parquet[1].mixed"]
    assert changed != first


def test_cells_of_a_saved_data_set_are_not_read_again(planner: Planner, tmp_path: Path) -> None:
    import datasets

    cells = [{"bytes": png(i), "path": None} for i in range(2)]
    saved = datasets.Dataset.from_dict({"image": cells, "control": [[cells[0]], cells], "prompt": ["red", "blue"]})
    saved.save_to_disk(tmp_path / "saved")
    planner.source = str(tmp_path / "saved")
    first, read = planner()
    assert len(read) == 5
    assert planner() == (first, [])
