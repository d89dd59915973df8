"""`caption`: the model's own greedy answer becomes a prompt in a file that people can correct, once, and nothing that
exists is replaced unless asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen_cache.encode import caption as captioning
from qwen_cache.encode.caption import REPETITION_PENALTY, load_captioners, smaller
from qwen_cache.models.encoders import load_text_encoder
from qwen_cache.models.folder import open_model
from qwen_cache.settings.load import load_config
from qwen_cache.sources.detect import read_source

from .support.commands import Result, refused, run
from .support.photographs import photograph

TinyModel = Callable[[str], Path]
NEW_TOKENS = 4


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "images", "system"),
    [
        ("edit-plus", 2, "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"),
        ("t2i", 1, "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"),
        ("qwen-image-21", 2, ""),
    ],
)
def test_a_caption_is_the_most_probable_answer(variant: str, images: int, system: str, tiny_model: TinyModel) -> None:
    """Token by token from the whole text, without generate, a cache of keys, or the processor."""
    folder = tiny_model(variant)
    model = open_model(str(folder), ("text_encoder",))
    config = load_config(None, [f"caption.max_new_tokens={NEW_TOKENS}", "cache.dtype=float32"])
    [captioner] = load_captioners(model, config)
    photos = [photograph("chelsea.png").resize((64 + 32 * i, 64)) for i in range(images)]
    found = captioner.caption(photos, "describe it")

    tokenizer = AutoTokenizer.from_pretrained(model.tokenizer, trust_remote_code=False)
    whole = load_text_encoder(folder / "text_encoder", torch.float32)
    has_processor = (folder / "processor").is_dir()
    pixels = (
        Qwen2VLImageProcessorPil.from_pretrained(folder / "processor") if has_processor else Qwen2VLImageProcessorPil()
    )(photos, return_tensors="pt")
    pads = [int(grid.prod()) // 4 for grid in pixels["image_grid_thw"]]
    slots = "".join(f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in pads)
    text = f"{system}<|im_start|>user\n{slots}describe it<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    begin, ends = ids.shape[1], tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    for _ in range(NEW_TOKENS):
        types = (ids == whole.config.image_token_id).int()
        with torch.no_grad():
            logits = whole(input_ids=ids, mm_token_type_ids=types, **pixels).logits[0, -1]
        seen = ids[0].unique()
        penalised = torch.where(logits > 0, logits / REPETITION_PENALTY, logits * REPETITION_PENALTY)[seen]
        best, second = logits.index_put((seen,), penalised).topk(2).values
        assert best - second > 1e-4 * logits.abs().max()  # far above the rounding of float32: no other kernel decides
        ids = torch.cat([ids, logits.index_put((seen,), penalised).argmax()[None, None]], 1)
        if int(ids[0, -1]) in ends:
            break
    assert found == " ".join(tokenizer.decode(ids[0, begin:], skip_special_tokens=True).split())
    assert found


def test_large_images_are_made_smaller_in_their_own_shape() -> None:
    assert smaller(Image.new("RGB", (4000, 1000)), 640_000).size == (1600, 400)
    assert smaller(Image.new("RGB", (40, 10)), 640_000).size == (40, 10)


# ---- the files -------------------------------------------------------------------------------------------------------


class Writer:
    """In place of a captioner: says what it was asked about."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.stop_after = 99

    def caption(self, images: Sequence[Image.Image], instruction: str) -> str:
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(f"{instruction}: {len(images)} images")
        return f"{instruction}, caption {len(self.asked)}"


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Writer:
    found = Writer()
    monkeypatch.setattr(captioning, "load_captioners", lambda *_: [found])
    return found


@pytest.fixture
def caption(tiny_model: TinyModel) -> Callable[..., Result]:
    def command(source: Path, *options: str | Path, variant: str = "edit-plus") -> Result:
        texts = ("--set", "caption.instruction=describe", "--set", "caption.edit_instruction=edit")
        return run("qwen-cache", "caption", source, "--model", tiny_model(variant), *texts, *options)

    return command


def test_missing_prompts_become_text_files_beside_their_targets(
    pairs: Path, writer: Writer, caption: Callable[..., Result]
) -> None:
    targets = pairs / "target_images"
    kept = {path: path.read_bytes() for path in targets.glob("c*.txt")}
    for name in ("cat", "cup"):
        (targets / f"{name}.txt").unlink()
        del kept[targets / f"{name}.txt"]
    shown = caption(pairs, "--dry-run", "--json")
    assert json.loads(shown.stdout) == {"samples": 4, "to_caption": 2, "failed": 0, "source": str(pairs)}
    assert "4 samples, 2 to caption" in shown.stderr
    assert not writer.asked
    result = caption(pairs)
    assert result.code == 0, result.stderr
    assert writer.asked == ["edit: 3 images", "edit: 2 images"]
    assert f"2 captions written; read and correct them\nnext:\n  qwen-cache build {pairs}" in result.stderr
    assert (targets / "cat.txt").read_text() == "edit, caption 1\n"
    assert {path: path.read_bytes() for path in kept} == kept
    assert caption(pairs).code == 0
    assert len(writer.asked) == 2
    (targets / "cat.txt").write_text("")
    refused(caption(pairs), f"{targets / 'cat.txt'}: a text file exists", "found 1 such files", "--replace")
    assert caption(pairs, "--replace").code == 0
    assert len(writer.asked) == 6
    rows, problems = read_source(pairs, needs_control=True)
    assert not problems
    assert [row.prompt for row in rows] == [f"edit, caption {number}" for number in (3, 4, 5, 6)]


def test_the_source_is_read_with_the_settings_of_build(
    pairs: Path, writer: Writer, caption: Callable[..., Result]
) -> None:
    """A target without a control is one where `data.allow_no_control` lets `build` take it."""
    (pairs / "control_images" / "cup.png").unlink()
    (pairs / "control_images" / "cup_mask.png").unlink()
    (pairs / "target_images" / "cup.txt").unlink()
    refused(caption(pairs), "1 problem in the source")
    assert caption(pairs, "--set", "data.allow_no_control=true", "--set", "data.marked_phrases=true").code == 0
    assert writer.asked == ["describe: 1 images"]
    assert (pairs / "target_images" / "cup.txt").read_text() == "describe, caption 1\n"


def test_an_image_that_cannot_be_read_leaves_the_others_their_captions(
    tmp_path: Path, writer: Writer, caption: Callable[..., Result]
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    result = caption(tmp_path, variant="t2i")
    assert result.code == 1
    assert f"{tmp_path / 'b.png'}: " in result.stderr
    assert "1 caption written" in result.stderr
    assert writer.asked == ["describe: 1 images"]
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == ["a.txt"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "t.csv",
            'n,image,text\n1,a.png,"a, b"\n2,b.png,\n3,c.png,\n',
            'n,image,text\n1,a.png,"a, b"\n2,b.png,{1}\n3,c.png,{2}\n',
        ),
        ("t.csv", "image\na.png\nb.png\nc.png\n", "image,prompt\na.png,{1}\nb.png,{2}\nc.png,{3}\n"),
        (
            "t.jsonl",
            '{"image": "a.png", "prompts": ["ä"]}\n{"image": "b.png"}\n{"image": "c.png", "prompts": []}\n',
            '{"image": "a.png", "prompts": ["ä"]}\n{"image": "b.png", "prompts": ["{1}"]}\n'
            '{"image": "c.png", "prompts": ["{2}"]}\n',
        ),
    ],
)
def test_a_table_is_copied_with_captions_in_place_of_empty_prompts(
    name: str, text: str, expected: str, tmp_path: Path, writer: Writer, caption: Callable[..., Result]
) -> None:
    """And a run that is stopped continues, but not one with other settings."""
    for image in "abc":
        Image.new("RGB", (64, 64)).save(tmp_path / f"{image}.png")
    (tmp_path / name).write_text(text, encoding="utf-8")
    copy = tmp_path / f"t-captioned{Path(name).suffix}"
    writer.stop_after = 1
    assert caption(tmp_path / name, variant="t2i").code != 0
    assert not copy.exists()
    partial, writer.stop_after = tmp_path / f"{copy.name}.partial", 99
    kept = partial.read_bytes()
    assert caption(tmp_path / name, "--set", "caption.image_size=4096", variant="t2i").code == 0
    assert writer.asked == ["describe: 1 images"] * (1 + sum(f"{{{number}}}" in expected for number in (1, 2, 3)))
    copy.unlink()
    partial.write_bytes(kept + b'\n["torn')
    del writer.asked[1:]
    result = caption(tmp_path / name, variant="t2i")
    assert result.code == 0, result.stderr
    assert f"qwen-cache build {copy}" in result.stderr
    for number in range(1, 4):
        expected = expected.replace(f"{{{number}}}", f"describe, caption {number}")
    if name.endswith("csv"):
        expected = expected.replace(",describe, caption", ',"describe, caption')
        expected = "\n".join(f'{line}"' if '"describe' in line else line for line in expected.split("\n"))
    assert copy.read_text(encoding="utf-8") == expected
    assert (tmp_path / name).read_text(encoding="utf-8") == text
    assert not list(tmp_path.glob("*.partial"))
    refused(caption(tmp_path / name, variant="t2i"), f"{copy}: this table has been written already", "--replace")
    rows, problems = read_source(copy, needs_control=False)
    assert (len(rows), problems) == (3, [])


def test_a_table_that_changes_gets_no_caption_of_another_row(
    tmp_path: Path, writer: Writer, caption: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a stopped run and the next, or during one. The copy is marked as UTF-8 where the table is."""
    for image in "abc":
        Image.new("RGB", (64, 64)).save(tmp_path / f"{image}.png")
    table, mark, answer = tmp_path / "t.csv", "\ufeff", writer.caption
    table.write_text(f"{mark}image,text\r\na.png,\r\nb.png,\r\n", encoding="utf-8", newline="")
    writer.stop_after = 1
    assert caption(table, variant="t2i").code != 0
    writer.stop_after = 99
    table.write_text(f"{mark}image,text\r\nc.png,ä\r\na.png,\r\nb.png,\r\n", encoding="utf-8", newline="")

    def changing(images: Sequence[Image.Image], instruction: str) -> str:
        table.write_text(f'{mark}image,text\nb.png,\na.png,\nc.png,"two\nlines"\n', encoding="utf-8")
        return answer(images, instruction)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "caption", changing)
        what = f"{table}: this table was changed while its captions were written"
        refused(caption(table, variant="t2i"), what, "run the same command again: the captions so far are kept")
    assert caption(table, variant="t2i").code == 0
    assert len(writer.asked) == 2
    expected = f'{mark}image,text\nb.png,"describe, caption 2"\na.png,"describe, caption 1"\nc.png,"two\nlines"\n'
    assert (tmp_path / "t-captioned.csv").read_text(encoding="utf-8") == expected


def test_another_model_may_be_a_repository_on_the_hub(
    tmp_path: Path, caption: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: (asked.append(name), tmp_path)[1])
    monkeypatch.setattr(captioning, "load_captioners", lambda model, _: (asked.append(model), [Writer()])[1])
    assert caption(tmp_path, "--captioner", "Qwen/Qwen2.5-VL-7B-Instruct", "--dry-run", variant="t2i").code == 0
    assert asked == []
    assert caption(tmp_path, "--captioner", "Qwen/Qwen2.5-VL-7B-Instruct", variant="t2i").code == 0
    assert asked == ["Qwen/Qwen2.5-VL-7B-Instruct", tmp_path]


def test_what_cannot_be_captioned_is_refused(
    tmp_path: Path, pairs: Path, writer: Writer, caption: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("image\na.png\n")
    elsewhere: Any = tmp_path / "x" / "t.csv"
    refused(caption(tmp_path / "t.csv", "--out", elsewhere, variant="t2i"), f"{elsewhere}: the copy of a table stands")
    refused(caption(pairs, "--out", elsewhere), "captions of a folder become text files", "leave out --out")
    (pairs / "control_images" / "cup.png").unlink()
    refused(caption(pairs), "1 problem in the source")
    monkeypatch.undo()
    wrong = caption(tmp_path / "t.csv", "--captioner", tmp_path / "none", variant="t2i")
    refused(wrong, f"{tmp_path / 'none'}: no such folder", "give the folder of a model, or a repository such as")
    assert not writer.asked
