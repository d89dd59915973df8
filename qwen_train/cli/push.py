"""`push`: a trained LoRA on the hub; what would be uploaded, or the address of what was."""

from __future__ import annotations

from pathlib import Path

from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.options import CONFIG, JSON, MODEL, OUTPUT, SET, argument, command, flag, option
from qwen_cache.settings.given import Given
from qwen_cache.terminal import console, human_bytes, print_done, print_json, print_next, print_text, typed_again
from qwen_cache.text import plain
from qwen_train.cli.best import STEP, chosen


@command(
    page="howto/generate-and-publish.md",
    examples=["qwen-train push out OWNER/NAME --dry-run", "qwen-train push out OWNER/NAME --step best --private"],
)
def push(
    folder: str | None = argument(
        "FOLDER", "The output folder of a run, or a checkpoint.", shown="train.output_dir, else out"
    ),
    repo: str | None = argument("REPO", "The repository on the Hugging Face hub, required: OWNER/NAME.", shown=False),
    base_model: str | None = option(MODEL, "The base model on the hub, if the run had it from a local folder.", "REPO"),
    step: str | None = STEP,
    private: bool = flag("--private", OUTPUT, "Make the repository private."),
    revision: str | None = option(OUTPUT, "The branch; created if there is none.", "BRANCH"),
    no_images: bool = flag("--no-images", OUTPUT, "Upload no validation images and no prompts."),
    keep_card: bool = flag("--keep-card", OUTPUT, "Leave the repository's README.md as it is."),
    dry_run: bool = flag("--dry-run", OUTPUT, "Show the files and the card, and upload nothing."),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Upload a trained LoRA to the Hugging Face hub, with a model card made from the run."""
    from qwen_cache.settings.load import load_config
    from qwen_train.run import in_one_process

    folder, repo = (folder, repo) if repo else (None, folder)
    if repo is None or (folder is None and Path(repo).is_dir()):
        raise ConfigError("push needs the repository to upload to", do="name it: qwen-train push out OWNER/NAME")
    settings = load_config(config, set_, [Given("FOLDER", "train.output_dir", folder) if folder else None])
    require("huggingface_hub")
    in_one_process("push")
    from qwen_train.training.publish import read_run, repository_of, upload

    name = repo.removeprefix("hf://")
    run = read_run(chosen(Path(settings.train.output_dir), step), base_model, set_ or ())
    published = repository_of(run, name, with_images=not no_images, with_card=not keep_card)
    for file, size in published.sizes.items():
        console(always=dry_run).print(f"{plain(file)}, {human_bytes(size)}", markup=False)
    address = None if dry_run else upload(published, name, private=private, revision=revision)
    if json:
        print_json({"repo": name, "files": published.sizes, "card": published.card, "commit": address})
    elif address:
        print_done(address)
    else:
        print_text(published.card)
        print_next(typed_again("qwen-train", without=["--dry-run"]))
    return 0
