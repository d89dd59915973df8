"""The configurations of models as they are published, as far as they could be read outside the hub.

Qwen-Image-2.1-Turbo's are those of revision d65dbc9a, byte for byte: written with two spaces and a newline, they have
the SHA-256 that others published. Those of Edit-2511 and 2512 are quoted in public documents, transformer and
scheduler. Of FireRed-Image-Edit-1.0, transformer/config.json and model_index.json were read; of 1.1, only the statement
that its transformer has no zero_cond_t (sgl-project/sglang PR 20862). No scheduler_config.json of either was found.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OF_20B: dict[str, Any] = {
    "_class_name": "QwenImageTransformer2DModel",
    "_diffusers_version": "0.36.0.dev0",
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "guidance_embeds": False,
    "in_channels": 64,
    "joint_attention_dim": 3584,
    "num_attention_heads": 24,
    "num_layers": 60,
    "out_channels": 16,
    "patch_size": 2,
}
DYNAMIC: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.36.0.dev0",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
TURBO = "Qwen/Qwen-Image-2.1-Turbo"
TURBO_SIGMAS = [1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568]
TURBO_SHA256 = {
    "model_index.json": "97e2febeb19d93cb41fa44807cde8bd42757950b5dffeacdb0331fb2d390cf20",
    "scheduler/scheduler_config.json": "16c948c71f9152a34cce6e3a2f309e97ad2dca32beecbe5e2fd3a7925b7eb4bb",
    "transformer/config.json": "2c567038ca190824728844b8d06d94ae02360e668707afd9734e789a7eb58ce3",
}


@dataclass(frozen=True)
class Published:
    """The configurations of a model; `scheduler` is None where it was not found."""

    index: dict[str, Any]
    transformer: dict[str, Any]
    scheduler: dict[str, Any] | None = None

    def write(self, folder: Path) -> Path:
        """A model's folder without weights."""
        files = {"model_index.json": self.index, "transformer/config.json": self.transformer}
        files |= {"scheduler/scheduler_config.json": self.scheduler} if self.scheduler else {}
        for name, values in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(f"{json.dumps(values, indent=2)}\n".encode())
        return folder


def _index(pipeline: str, **others: Any) -> dict[str, Any]:
    """model_index.json of a model of the 20B family."""
    return {
        "_class_name": pipeline,
        "_diffusers_version": "0.36.0.dev0",
        **others,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }


EDIT_PLUS = _index("QwenImageEditPlusPipeline", processor=["transformers", "Qwen2VLProcessor"])
PUBLISHED = {
    "Qwen/Qwen-Image-Edit-2511": Published(EDIT_PLUS, {**OF_20B, "zero_cond_t": True}, DYNAMIC),
    "Qwen/Qwen-Image-2512": Published(_index("QwenImagePipeline"), OF_20B, DYNAMIC),
    "FireRedTeam/FireRed-Image-Edit-1.0": Published(EDIT_PLUS, OF_20B),
    "FireRedTeam/FireRed-Image-Edit-1.1": Published(EDIT_PLUS, OF_20B),
    TURBO: Published(
        {
            "_class_name": "QwenImage21Pipeline",
            "_diffusers_version": "0.41.0.dev0",
            "processor": ["transformers", "Qwen3VLProcessor"],
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
            "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
            "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
            "vae": ["diffusers", "AutoencoderKLQwenImage21"],
            "sample_sigmas": TURBO_SIGMAS,
        },
        {
            "_class_name": "QwenImage21Transformer2DModel",
            "_diffusers_version": "0.41.0.dev0",
            "attention_head_dim": 128,
            "axes_dims_rope": [16, 56, 56],
            "causal_condition": True,
            "context_in_dim": 4096,
            "eps": 1e-06,
            "in_channels": 64,
            "mlp_ratio": 3,
            "num_attention_heads": 32,
            "num_layers": 32,
            "out_channels": 64,
            "patch_size": 1,
        },
        {
            **DYNAMIC,
            "_diffusers_version": "0.41.0.dev0",
            "shift_terminal": None,
            "use_dynamic_shifting": False,
        },
    ),
}
