"""The command line of `qwen-train`: a table of its commands. Each has a module with its options and its work."""

from qwen_cache.options import Commands, config_command, program, run_app

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = Commands(
    {
        "run": "qwen_train.cli.run:run",
        "predict": "qwen_train.cli.predict:predict",
        "decode": "qwen_train.cli.decode:decode",
        "report": "qwen_train.cli.report:report",
        "plan": "qwen_train.cli.plan:plan",
        "export": "qwen_train.cli.export:export",
        "push": "qwen_train.cli.push:push",
        "mask-head": "qwen_train.cli.mask_head:mask_head",
        "config": "qwen_train.cli:config",
    }
)
config = config_command("qwen-train")
app = program("qwen-train", "Train a LoRA for Qwen-Image-Edit from a cache, and generate images with it.", COMMANDS)


def main() -> None:
    run_app(app)
