"""The command line of `qwen-cache`: a table of its commands. Each has a module with its options and its work."""

from qwen_cache.options import Commands, config_command, program, run_app

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = Commands(
    {
        "Start": {
            "init": "qwen_cache.cli.init:init",
            "ui": "qwen_cache.cli.ui:ui",
            "config": "qwen_cache.cli:config",
            "doctor": "qwen_cache.cli.doctor:doctor",
        },
        "Build": {
            "build": "qwen_cache.cli.build:build",
            "caption": "qwen_cache.cli.caption:caption",
            "inspect": "qwen_cache.cli.inspect:inspect",
            "verify": "qwen_cache.cli.verify:verify",
        },
        "Share": {
            "serve": "qwen_cache.cli.serve:serve",
            "push": "qwen_cache.cli.push:push",
            "export": "qwen_cache.cli.trainers:export",
            "import": "qwen_cache.cli.trainers:import_",
        },
        "Maintain": {
            "merge": "qwen_cache.cli.merge:merge",
            "migrate": "qwen_cache.cli.merge:migrate",
            "gc": "qwen_cache.cli.gc:gc",
        },
        "Experimental": {
            "ground": "qwen_cache.cli.ground:ground",
        },
        "Internal": {
            "encode-worker": "qwen_cache.cli.serve:encode_worker",
        },
    },
    meant={
        **dict.fromkeys(("encode", "cache"), "qwen-cache build"),
        **dict.fromkeys(("train", "run"), "qwen-train run"),
        **dict.fromkeys(("generate", "sample", "predict"), "qwen-train predict"),
        **dict.fromkeys(("show", "info", "stats"), "qwen-cache inspect"),
        **dict.fromkeys(("check", "validate"), "qwen-cache verify"),
        **dict.fromkeys(("clean", "prune"), "qwen-cache gc"),
        **dict.fromkeys(("upload", "publish"), "qwen-cache push"),
        **dict.fromkeys(("upgrade", "convert"), "qwen-cache migrate"),
        "plan": "qwen-train plan",
        "server": "qwen-cache serve",
        "web": "qwen-cache ui",
    },
)
config = config_command("qwen-cache")
app = program(
    "qwen-cache", "Run the frozen encoders of Qwen-Image-Edit once, and cache their outputs as a dataset.", COMMANDS
)


def main() -> None:
    run_app(app)
