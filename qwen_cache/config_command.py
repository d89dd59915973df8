"""The command `config` of both programs: the settings of qwen.yaml with their values, searched by words."""

from __future__ import annotations

from typing import Annotated

import typer

from qwen_cache.options import INPUT, Assignments, ConfigFile, Json, command


def add_config_command(app: typer.Typer) -> None:
    program = app.info.name

    @command(
        app,
        page="howto/choose-what-is-trained.md",
        examples=[f"{program} config --search lr", f"{program} config --config out/qwen.yaml"],
    )
    def config(
        search: Annotated[
            str | None,
            typer.Option(
                help="Only settings with these words in their name, name in other trainers, or description.",
                metavar="WORDS",
                rich_help_panel=INPUT,
            ),
        ] = None,
        json: Json = False,
        config: ConfigFile = None,
        set_: Assignments = None,
    ) -> int:
        """Print all settings of qwen.yaml with their values and descriptions, as a settings file."""
        from qwen_cache.console import print_json, print_text
        from qwen_cache.errors import ConfigError
        from qwen_cache.settings.listing import all_settings, found_by, to_json, to_yaml
        from qwen_cache.settings.load import load_config

        settings = list(all_settings()) if search is None else found_by(search)
        if not settings:
            raise ConfigError("no setting matches these words", where="--search", found=search, do="try a single word")
        values = load_config(config, set_)
        if json:
            print_json(to_json(settings, values))
        else:
            print_text(to_yaml(settings, values))
        return 0
