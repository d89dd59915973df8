"""`predict`: its options; the work is in `qwen_train.inference`."""

from __future__ import annotations

from pathlib import Path

from qwen_cache.errors import ConfigError
from qwen_cache.options import (
    CONFIG,
    DEVICES,
    GENERATE,
    JSON,
    MODEL,
    MODEL_PATH,
    OUTPUT,
    SAMPLING,
    SET,
    TEXT_ENCODER,
    TRANSFORMER,
    VAE,
    command,
    flag,
    given_controls,
    option,
    setting,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import print_next, typed_again

PROMPT = option(GENERATE, "The instruction; repeat it for several images.", "TEXT")
IMAGE = option(GENERATE, "A control image; repeat it for more.", "FILE")
SOURCE = option(
    GENERATE,
    "An image per row, into --out: a folder of images with prompts (NAME.txt) or --prompt, or any source of "
    "`qwen-cache build`, with or without targets.",
    "SOURCE",
)
TARGETS = setting(
    "data.columns.target",
    GENERATE,
    "The folder, column or tar part of --source with the targets.",
    "NAME",
    name="--targets",
)
CONTROLS = option(GENERATE, "The same with the controls; repeat it for more.", "NAME")
FROM_CACHE = option(
    GENERATE,
    "Generate samples of this cache, named by --key; loads no text encoder.",
    "CACHE",
    shown="with --key, that of the run of --lora",
)
KEY = option(GENERATE, "A sample of --from-cache, by name, key or start of the key; repeat it for more.", "NAME")
LORA = option(
    MODEL,
    "A LoRA's file or the folder of a run, with a weight such as out:0.8; repeat it for more.",
    "PATH[:WEIGHT]",
)
MERGE = flag("--merge", MODEL, "Add the LoRAs to the weights before generating.")
STEPS = setting("predict.num_inference_steps", SAMPLING, "Denoising steps.", default="50; Qwen-Image-2.1: 40")
SIGMAS = setting(
    "predict.sigmas", SAMPLING, "Noise levels such as 1,0.6,0.2, instead of --num-inference-steps.", "NUMBERS"
)
TRUE_CFG_SCALE = setting(
    "predict.true_cfg_scale",
    SAMPLING,
    "Classifier-free guidance, which doubles the time; 1 turns it off.",
    default="4 with --negative-prompt; Qwen-Image-2.1: 1",
)
NEGATIVE_PROMPT = setting("predict.negative_prompt", SAMPLING, "The prompt to guide away from; may be empty.")
GUIDANCE_SCALE = setting("predict.guidance_scale", SAMPLING, "For guidance-distilled models only.")
SEED = setting("predict.seed", SAMPLING, "The seed of the noise.")
SIZE = "In pixels, a multiple of 16 (Qwen-Image-2.1: 32)."
OF_LAST_IMAGE = "that of the last image, at about 1024² pixels"
HEIGHT = setting("predict.height", SAMPLING, SIZE, default=OF_LAST_IMAGE)
WIDTH = setting("predict.width", SAMPLING, SIZE, default=OF_LAST_IMAGE)
RESOLUTION = setting(
    "predict.output_resolution",
    SAMPLING,
    "Qwen-Image-2.1: control images and the result have about the square of it in pixels.",
    default="1024",
)
MAX_LENGTH = setting(
    "predict.max_sequence_length",
    SAMPLING,
    "The maximum number of tokens of a prompt without images.",
    default="512",
)
DEVICE = option(DEVICES, "The device of all components.", "DEVICE", default="auto")
VAE_DEVICE = option(DEVICES, "The device of the VAE.", "DEVICE", shown="--device")
TEXT_DEVICE = option(DEVICES, "The device of the text encoder.", "DEVICE", shown="--device")
TRANSFORMER_DEVICE = option(DEVICES, "The device of the transformer.", "DEVICE", shown="--device")
OFFLOAD = setting(
    "predict.offload",
    DEVICES,
    "Weights that stay in host memory until they compute: whole components (model), or layers (sequential).",
)
OUT = option(
    OUTPUT,
    "The image to write; with --source a folder, with --from-cache either.",
    "PATH",
    default=Path("out.png"),
)
NUM_IMAGES = setting("predict.num_images_per_prompt", OUTPUT, "Images per prompt: out-1.png, out-2.png, …")
COMPARE = flag("--compare", OUTPUT, "Also generate without the LoRAs, and write a page with all side by side.")
GRID = option(
    OUTPUT,
    "An image for each value, side by side: of lora_weight, checkpoint, num_inference_steps, true_cfg_scale or seed; "
    "a second axis makes rows.",
    "AXIS=V1,V2,…",
)
SAVE_INTERRUPTED = flag("--save-interrupted", OUTPUT, "When interrupted, save the unfinished image.")


@command(
    page="howto/generate-and-publish.md",
    examples=[
        "qwen-train predict --image photo.jpg --prompt 'make it night' --lora out",
        "qwen-train predict --from-cache shards --key cats/017 --lora out --out images",
    ],
    renamed={"--num-images": "--num-images-per-prompt", "--steps": "--num-inference-steps"},
)
def predict(
    prompt: list[str] | None = PROMPT,
    image: list[Path] | None = IMAGE,
    source: str | None = SOURCE,
    targets: Given | None = TARGETS,
    controls: list[str] | None = CONTROLS,
    from_cache: str | None = FROM_CACHE,
    key: list[str] | None = KEY,
    model: Given | None = MODEL_PATH,
    transformer: Given | None = TRANSFORMER,
    text_encoder: Given | None = TEXT_ENCODER,
    vae: Given | None = VAE,
    lora: list[str] | None = LORA,
    merge: bool = MERGE,
    num_inference_steps: Given | None = STEPS,
    sigmas: Given | None = SIGMAS,
    true_cfg_scale: Given | None = TRUE_CFG_SCALE,
    negative_prompt: Given | None = NEGATIVE_PROMPT,
    guidance_scale: Given | None = GUIDANCE_SCALE,
    seed: Given | None = SEED,
    height: Given | None = HEIGHT,
    width: Given | None = WIDTH,
    output_resolution: Given | None = RESOLUTION,
    max_sequence_length: Given | None = MAX_LENGTH,
    device: str = DEVICE,
    vae_device: str | None = VAE_DEVICE,
    text_device: str | None = TEXT_DEVICE,
    transformer_device: str | None = TRANSFORMER_DEVICE,
    offload: Given | None = OFFLOAD,
    out: Path = OUT,
    num_images_per_prompt: Given | None = NUM_IMAGES,
    compare: bool = COMPARE,
    grid: list[str] | None = GRID,
    save_interrupted: bool = SAVE_INTERRUPTED,
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Generate images with the stock pipeline and LoRAs, from --prompt, rows of --source, or samples --from-cache."""
    from qwen_cache.settings.load import CONFIG_NAME, load_config

    sizes, guidance = (height, width, output_resolution), (negative_prompt, true_cfg_scale, guidance_scale)
    others = (num_inference_steps, sigmas, num_images_per_prompt, seed, max_sequence_length, offload)
    columns = (targets, given_controls(controls))
    settings = load_config(config, set_, [model, transformer, text_encoder, vae, *columns, *others, *guidance, *sizes])
    from qwen_train.inference.predict import PredictOptions, check_guidance, run_predict
    from qwen_train.lora.files import split_weight
    from qwen_train.run import cache_of_run, run_of

    if key and not (from_cache or source) and lora:
        file = Path(split_weight(lora[0])[0])
        from_cache = cache_of_run(run_of(file if file.is_dir() else file.parent))
    check_guidance(settings.predict, settings.predict.true_cfg_scale if true_cfg_scale else None)
    if from_cache and any(sizes):
        do = "leave out --width, --height and --output-resolution"
        raise ConfigError("a cached sample has a fixed size", do=do)
    if from_cache and text_encoder:
        raise ConfigError("a cached sample has its prompt's embeddings", do="leave out --text-encoder")
    if any(columns) and not source:
        raise ConfigError("--targets and --controls go with --source", do="leave them out")
    what = (image or (), prompt or (), source, from_cache, key or (), lora or ())
    devices = (device, vae_device, text_device, transformer_device)
    options = PredictOptions(out, *what, devices, merge, compare, grid or (), save_interrupted, json)
    code = run_predict(settings, options)
    if code == 0 and lora and not json:
        compared = (
            []
            if compare or grid or merge or settings.predict.num_images_per_prompt > 1
            else [typed_again("qwen-train", added=["--compare"])]
        )
        folder = Path(split_weight(lora[0])[0])
        run = [["qwen-train", "push", str(folder), "OWNER/NAME"]] if (folder / CONFIG_NAME).is_file() else []
        print_next(*compared, *run)
    return code
