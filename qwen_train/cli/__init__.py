"""The command line of `qwen-train`: a table of its commands. Each has a module with its options and its work."""

from qwen_cache.options import Commands, config_command, program, run_app

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = Commands(
    {
        "Train": {
            "plan": "qwen_train.cli.plan:plan",
            "run": "qwen_train.cli.run:run",
            "decode": "qwen_train.cli.decode:decode",
            "report": "qwen_train.cli.report:report",
            "best": "qwen_train.cli.best:best",
            "config": "qwen_train.cli:config",
        },
        "Generate": {
            "predict": "qwen_train.cli.predict:predict",
        },
        "Share": {
            "export": "qwen_train.cli.export:export",
            "push": "qwen_train.cli.push:push",
        },
        "Experimental": {
            "mask-head": "qwen_train.cli.mask_head:mask_head",
        },
    },
    meant={
        **dict.fromkeys(("train", "start", "finetune", "fine-tune"), "qwen-train run"),
        **dict.fromkeys(("resume", "continue"), "qwen-train run --resume"),
        **dict.fromkeys(("generate", "sample", "infer", "inference"), "qwen-train predict"),
        **dict.fromkeys(("merge", "convert"), "qwen-train export --to merged"),
        **dict.fromkeys(("upload", "publish"), "qwen-train push"),
        **dict.fromkeys(("memory", "estimate"), "qwen-train plan"),
        "init": "qwen-cache init",
        "build": "qwen-cache build",
        "ui": "qwen-cache ui",
        "doctor": "qwen-cache doctor",
    },
)
config = config_command("qwen-train")
app = program("qwen-train", "Train a LoRA for Qwen-Image-Edit from a cache, and generate images with it.", COMMANDS)


def main() -> None:
    run_app(app)
