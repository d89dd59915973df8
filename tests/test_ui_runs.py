"""The Train page's view of the folders of runs: metrics, settings, images; judged by plain computations."""

from __future__ import annotations

import io
import json
import math
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qwen_cache.service.http import RefusedError
from qwen_train.run import METRICS_NAME
from qwen_train.ui import runs, search
from qwen_train.ui.workspace import Workspace

from .support.written_runs import KEY, write_image, write_lines, write_run

OTHER = "f" * 32
NAN = math.nan


def read(path: Path) -> runs.MetricsFile:
    file = runs.MetricsFile(path)
    file.look()
    return file


def series(file: runs.MetricsFile, name: str) -> list[tuple[int, float]]:
    steps, values = file.snapshot()[0][name]
    return list(zip(steps.tolist(), values.tolist(), strict=True))


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_read_further_from_where_the_last_look_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path, {"step": 1, "loss": 3}, '{"step": 2, "lo', end="")
    file = read(path)
    assert series(file, "loss") == [(1, 3.0)]
    assert file.is_incomplete
    assert file.damaged == 0
    before, taken = file.version, list[bytes]()
    monkeypatch.setattr(file, "_take", lambda data, take=file._take: (taken.append(data), take(data)))
    with path.open("a", encoding="utf-8") as opened:
        opened.write('ss": 2}\n{"step": 4, "loss": 1, "grad_norm": 7}\n')
    file.look()
    assert b"".join(taken) == b'ss": 2}\n{"step": 4, "loss": 1, "grad_norm": 7}\n'
    assert series(file, "loss") == [(1, 3.0), (2, 2.0), (4, 1.0)]
    assert series(file, "grad_norm") == [(4, 7.0)]
    assert not file.is_incomplete
    assert file.version != before


def test_a_file_that_was_replaced_or_shortened_is_read_again(tmp_path: Path) -> None:
    """A resumed run writes a new file, without the steps that it repeats."""
    path = write_lines(tmp_path / "run", *({"step": step, "loss": step} for step in range(1, 9)))
    file = read(path)
    new = write_lines(tmp_path / "new", {"step": 1, "loss": 5}, {"step": 2, "loss": 6}, *[{"step": 3, "loss": 1}] * 30)
    os.replace(new, path)
    file.look()
    assert series(file, "loss") == [(1, 5.0), (2, 6.0), (3, 1.0)]
    path.write_text('{"step": 1, "loss": 7}\n', encoding="utf-8")
    file.look()
    assert series(file, "loss") == [(1, 7.0)]


DAMAGED = (
    "\0\0\0\0",
    '{"step": 3',
    "[1, 2]",
    '{"loss": 1}',
    '{"step": true, "loss": 1}',
    '{"step": -1, "loss": 1}',
    '{"step": 4, "loss": "1"}',
    '{"step": 4, "loss": 1e200}',
    '{"step": 1, "loss": 1}',
    "[" * 5000,
    '{"step": 5, "name": "' + "x" * 70_000 + '"}',
    '{"step": 5, "loss": ' + "9" * 70_000 + "}",
)


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    """Beginnings, zeros, other types, steps that do not ascend, endless lines."""
    path = write_lines(tmp_path, {"step": 2, "loss": 3}, *DAMAGED, "", {"step": 9, "loss": 4})
    file = read(path)
    assert series(file, "loss") == [(2, 3.0), (9, 4.0)]
    assert file.damaged == len(DAMAGED)
    assert runs.curves(file)["damaged"] == len(DAMAGED)


def test_a_line_without_end_stays_small(tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    path.write_bytes(b'{"step": 1, "loss": 1}\n' + b"x" * (3 << 20))
    file = read(path)
    assert not file.is_incomplete, "what is no line is not kept"
    with path.open("ab") as opened_again:
        opened_again.write(b'xxx\n{"step": 2, "loss": 2}\n')
    file.look()
    assert series(file, "loss") == [(1, 1.0), (2, 2.0)]
    assert file.damaged == 1


def test_values_that_are_not_finite_are_gaps_in_strict_json(tmp_path: Path) -> None:
    lines = ({"step": i, "loss": value} for i, value in enumerate([1.0, NAN, 3.0, math.inf, -math.inf, 2.0], 1))
    made = runs.curves(read(write_lines(tmp_path, *lines)), 0.5)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["series"]["loss"]["values"] == [1.0, None, 3.0, None, None, 2.0]
    assert made["series"]["loss"]["not_finite"] == 3
    averages = made["series"]["loss_smoothed"]["values"]
    assert averages == [1.0, None, pytest.approx((0.5 * 1 + 3) / 1.5), None, None, pytest.approx(3.75 / 1.75)]


def outline(steps: list[int], values: list[float], points: int) -> list[int]:
    """Which points a chart of points / 4 columns needs, plainly: of each column first, last, lowest, highest, a gap."""
    columns: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        columns.setdefault(int((step - steps[0]) / ((steps[-1] - steps[0] + 1) / (points // 4))), []).append(i)
    kept = set()
    for of_one in columns.values():
        finite = [i for i in of_one if math.isfinite(values[i])]
        kept |= {of_one[0], of_one[-1], *[i for i in of_one if not math.isfinite(values[i])][:1]}
        kept |= {min(finite, key=lambda i: values[i]), max(finite, key=lambda i: values[i])} if finite else set()
    return sorted(kept)


@pytest.mark.parametrize("seed", range(4))
def test_of_many_points_the_outline_is_shown(seed: int) -> None:
    """Steps with holes, equal values, runs of NaN: the same points as a plain reference, all of them in the file."""
    random = np.random.default_rng(seed)
    steps = np.cumsum(random.choice([1, 1, 1, 50], 3000))
    values = random.normal(size=3000).round(1 + seed)
    values[random.random(3000) < 0.02] = NAN
    values[1000:1100] = math.inf
    found = runs.shown(steps, values, 200)
    assert found.tolist() == outline(steps.tolist(), values.tolist(), 200)
    assert len(found) <= 5 * 50
    assert runs.shown(steps[:200], values[:200], 200).tolist() == list(range(200))


# ---- the folders of runs ---------------------------------------------------------------------------------------------


def test_runs_caches_and_models_are_found_but_nothing_inside_them_or_behind_links(tmp_path: Path) -> None:
    project, outside = tmp_path / "project", write_run(tmp_path / "outside")
    for name in ("out", "runs/2026/cats", "a/b/c/d", "a/b/c/d/e", ".hidden/run", "out/inside"):
        write_run(project / name)
    for name, file in (("shards", "cache.json"), ("shards/validation", "cache.json"), ("models/m", "model_index.json")):
        (project / name).mkdir(parents=True)
        (project / name / file).write_text("{}", encoding="utf-8")
    (project / "linked").symlink_to(outside)
    half = project / "half"
    half.mkdir()
    (half / "qwen.yaml").write_text("{}", encoding="utf-8")
    (half / METRICS_NAME).symlink_to(outside / METRICS_NAME)
    workspace = Workspace.open(project)
    found = search.find(workspace)
    assert [workspace.shown(each) for each in found.runs] == ["out", "runs/2026/cats", "a/b/c/d"]
    assert [workspace.shown(each) for each in found.caches] == ["shards"]
    assert [workspace.shown(each) for each in found.models] == ["models/m"]
    for name in ("linked", "half", "../outside", "shards", str(outside)):
        with pytest.raises(RefusedError):
            runs.run_at(workspace, name)


def test_a_new_run_gets_a_free_name(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path)
    assert runs.new_name(workspace, "out") == "out"
    for name in ("out", "out-2", "runs/cats"):
        (tmp_path / name).mkdir(parents=True)
    assert [runs.new_name(workspace, name) for name in ("out", "out-2", "runs/cats")] == [
        "out-3",
        "out-3",
        "runs/cats-2",
    ]


def test_a_run_is_running_while_the_process_in_its_lock_exists(tmp_path: Path) -> None:
    run, lock = write_run(tmp_path / "out"), tmp_path / "out" / ".lock"
    assert not runs.is_running(run)
    lock.write_text(f"\nprocess {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    assert runs.is_running(run)
    lock.write_text(f"\nprocess {1 << 30} on {socket.gethostname()}", encoding="utf-8")
    assert not runs.is_running(run), "a run that was killed"
    lock.write_text("\nprocess 1 on another-machine", encoding="utf-8")
    assert runs.is_running(run)
    lock.write_text("", encoding="utf-8")
    assert not runs.is_running(run)


def test_only_settings_that_differ_are_listed() -> None:
    known = frozenset({"train.lora.rank_pattern", "train.lora.rank", "train.caches"})
    one = {"train": {"lora": {"rank": 16, "rank_pattern": {"to_q": 1}}, "output_dir": "a", "fsdp": True, "ema": 1}}
    two = {"train": {"lora": {"rank": 32, "rank_pattern": {"to_q": 2}}, "output_dir": "b", "fsdp": 1, "ema": 1.0}}
    two["train"]["new"] = None
    rows = runs.differing({"a": runs.flat(one, known), "b": runs.flat(two, known)})
    assert rows == [
        {"key": "train.lora.rank", "values": ["16", "32"]},
        {"key": "train.lora.rank_pattern", "values": ['{"to_q": 1}', '{"to_q": 2}']},
        {"key": "train.fsdp", "values": ["true", "1"]},
        {"key": "train.new", "values": [None, "null"]},
    ]


# ---- images ----------------------------------------------------------------------------------------------------------


def test_images_are_listed_by_sample_and_step(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    words = {"name": "cats/2", "prompt": "make it <b>red</b>", "true_cfg_scale": "[1, 4]"}
    for place in ("step-10", "step-9"):
        write_image(run, place, **words)
        write_image(run, place, number=2)
    write_image(run, "step-9", OTHER, name="cats/10", prompt="blue")
    write_image(run, "target")
    for number in (1, 2):
        write_image(run, "controls", number=number)
    (run / "validation" / "step-10" / f"{OTHER}.safetensors").write_bytes(b"")
    for strange in ("step-9/notes.png", f"step-9/{KEY}.jpg", f"step-x/{KEY}.png", f"other/{KEY}.png"):
        path = run / "validation" / strange
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    made = runs.listed(run)
    first, second = made["samples"]
    paths = [[image["path"] for image in step["images"]] for step in first["steps"]]
    assert (first["name"], first["prompt"], first["titles"]) == (
        "cats/2",
        "make it <b>red</b>",
        ["true_cfg_scale 1", "true_cfg_scale 4"],
    )
    assert [step["step"] for step in first["steps"]] == [9, 10]
    assert paths == [[f"step-{n}/{KEY}.png", f"step-{n}/{KEY}-2.png"] for n in (9, 10)]
    assert [image["path"] for image in first["target"]] == [f"target/{KEY}.png"]
    assert [image["path"] for image in first["controls"]] == [f"controls/{KEY}.png", f"controls/{KEY}-2.png"]
    assert first["controls"][0]["size"] == (64, 32)
    assert (second["name"], second["steps"][0]["step"], len(second["steps"])) == ("cats/10", 9, 1)
    assert (made["waiting"], made["steps"]) == (1, [9, 10])


@pytest.mark.parametrize("header", [b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little"), b"\2\0\0\0\0\0\0\0[]", b"\1"])
def test_damaged_latents_only_cost_their_words(tmp_path: Path, header: bytes) -> None:
    write_image(write_run(tmp_path), "step-0")
    (tmp_path / "validation" / "step-0" / f"{KEY}.safetensors").write_bytes(header)
    (sample,) = runs.listed(tmp_path)["samples"]
    assert (sample["name"], sample["prompt"]) == (KEY, "")


def test_nothing_but_the_images_of_a_run_is_read(tmp_path: Path) -> None:
    run, secret = write_run(tmp_path / "out"), tmp_path / "secret.png"
    write_image(run, "step-0")
    Image.new("RGB", (8, 8)).save(secret)
    folder = run / "validation" / "step-0"
    (folder / f"{OTHER}.png").symlink_to(secret)
    (run / "validation" / "step-1").symlink_to(folder)
    (folder / f"{'a' * 32}.png").write_bytes(b"GIF89a")
    assert runs.read(run, f"step-0/{KEY}.png").startswith(b"\x89PNG")
    for path in (
        "step-0/../../../secret.png",
        "step-0/secret.png",
        f"../out/validation/step-0/{KEY}.png",
        f"step-0/{KEY}.safetensors",
        f"step-0/{KEY}.png\0",
        f"step-0/{KEY}.png\n",
        f"step-0/{OTHER}.png",
        f"step-1/{KEY}.png",
        f"step-2/{KEY}.png",
        f"step-0/{'a' * 32}.png",
        str(secret),
        "",
    ):
        with pytest.raises(RefusedError):
            runs.read(run, path)
    listed = [it["path"] for sample in runs.listed(run)["samples"] for s in sample["steps"] for it in s["images"]]
    assert OTHER not in "".join(listed)
    assert "step-1" not in "".join(listed)


def test_a_small_copy_is_on_white_and_a_damaged_png_is_refused(tmp_path: Path) -> None:
    data = write_image(write_run(tmp_path), "step-0").read_bytes()
    with Image.open(io.BytesIO(runs.small(data, 16))) as copy:
        assert (copy.format, copy.size) == ("JPEG", (16, 8))
        assert min(np.asarray(copy).ravel()) > 250
    for damaged in (data[:-30], data[:-16] + bytes(4) + data[-12:]):  # cut off; another checksum
        with pytest.raises(RefusedError):
            runs.small(damaged, 16)
