"""Image encoders with random weights: transformers on one side, the tensors of an engine on the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lazy import LazyModule
from tiny_images import TOKENS, VISION, make_config, make_vision_tensors

from wicore_trt.backends.torch.vision import VisionWeights
from wicore_trt.model.hf_config import read_hf_config, read_vision_config

transformers = LazyModule("transformers")
image_processing = LazyModule("transformers.models.gemma3.image_processing_pil_gemma3")
modeling = LazyModule("transformers.models.gemma3.modeling_gemma3")

_TOWER, _PROJECTOR = "vision_tower.vision_model.", "multi_modal_projector."


@dataclass(frozen=True)
class RandomEncoder:
    """Weights that both sides see."""

    weights: VisionWeights
    tower: Any
    projector: Any

    @torch.inference_mode()
    def hf_features(self, pixels: torch.Tensor) -> torch.Tensor:
        """transformers' features [tokens, text hidden size] of uint8 [size, size, 3], its processor included."""
        processor = image_processing.Gemma3ImageProcessorPil(do_resize=False)
        values = processor([pixels.numpy()], return_tensors="pt", input_data_format="channels_last")["pixel_values"]
        seen = self.tower(pixel_values=torch.as_tensor(values).to(self.tower.device), return_dict=True)
        return self.projector(seen.last_hidden_state)[0].cpu()


def random_encoder(
    seed: int, vision: dict[str, Any] | None = None, *, tokens: int = TOKENS, text_hidden: int = 16
) -> RandomEncoder:
    """`vision` replaces keys of the tiny encoder's config."""
    config = make_config(VISION | (vision or {}), tokens=tokens, hidden_size=text_hidden)
    spec = read_vision_config(config, read_hf_config(config))
    assert spec is not None
    arrays = make_vision_tensors(config["vision_config"], text_hidden, seed)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    theirs = transformers.Gemma3Config(**{key: value for key, value in config.items() if key != "model_type"})
    tower, projector = transformers.SiglipVisionModel(theirs.vision_config), modeling.Gemma3MultiModalProjector(theirs)
    for model, prefix in ((tower, _TOWER), (projector, _PROJECTOR)):
        model.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    return RandomEncoder(VisionWeights(spec, tensors), tower.eval(), projector.eval())


def random_pixels(seed: int, size: int) -> torch.Tensor:
    """A smooth image with noise, all values in it."""
    random = np.random.default_rng(seed)
    slope = np.linspace(0, 255, size)[:, None, None] * random.random((1, size, 3))
    return torch.from_numpy(np.clip(slope + random.normal(0, 60, (size, size, 3)), 0, 255).astype(np.uint8))
