"""The command line of `qwen-cache`: a table of its commands. Each has a module with its options and its work."""

from qwen_cache.options import Commands, config_command, program, run_app

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = Commands(
    {
        "init": "qwen_cache.cli.init:init",
        "build": "qwen_cache.cli.build:build",
        "encode-worker": "qwen_cache.cli.serve:encode_worker",
        "serve": "qwen_cache.cli.serve:serve",
        "ui": "qwen_cache.cli.ui:ui",
        "verify": "qwen_cache.cli.verify:verify",
        "inspect": "qwen_cache.cli.inspect:inspect",
        "migrate": "qwen_cache.cli.merge:migrate",
        "merge": "qwen_cache.cli.merge:merge",
        "export": "qwen_cache.cli.trainers:export",
        "import": "qwen_cache.cli.trainers:import_",
        "gc": "qwen_cache.cli.gc:gc",
        "push": "qwen_cache.cli.push:push",
        "caption": "qwen_cache.cli.caption:caption",
        "ground": "qwen_cache.cli.ground:ground",
        "doctor": "qwen_cache.cli.doctor:doctor",
        "config": "qwen_cache.cli:config",
    }
)
config = config_command("qwen-cache")
app = program(
    "qwen-cache", "Run the frozen encoders of Qwen-Image-Edit once, and cache their outputs as a dataset.", COMMANDS
)


def main() -> None:
    run_app(app)
