"""What a server says of itself: everything that a client needs to compute keys."""

from __future__ import annotations

from typing import Any

from qwen_cache.extras import __version__
from qwen_cache.format.identity import recipe_id
from qwen_cache.serve.engine import Engine
from qwen_cache.settings.sections import SIZES
from qwen_cache.storage.remote import Url


def describe(engine: Engine) -> dict[str, Any]:
    """The description of a service, as JSON."""
    job, settings = engine.job, engine.settings
    data = job.config.data.model_dump(mode="json")
    cache = None
    if engine.store.stores:
        cache = str(job.folder) if isinstance(job.folder, Url) else "/v1/cache"
    return {
        "qwen_cache": __version__,
        "format_version": job.format_version,
        "pipeline": job.model.pipeline,
        "model": job.model.public_name,
        "recipe_name": job.recipe_name,
        "recipe_id": recipe_id(job.recipe),
        "recipe": job.recipe,
        "data": {name: data[name] for name in SIZES},
        "thumbnails": job.keeps_thumbnails,
        "prompt_embeds_width": job.model.text_width,
        "samples": len(engine.store),
        "cache": cache,
        "limits": {
            "max_body": int(settings.max_body),
            "max_pixels": settings.max_pixels,
            "queue_samples": settings.queue_samples,
        },
    }
