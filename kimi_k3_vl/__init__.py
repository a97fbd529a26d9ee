"""Kimi-K3 for mlx-vlm: our text model behind mlx-vlm's own vision tower, projector and processor.

mlx-vlm reaches it through `kimi_k3.py`, in a build or installed. It imports mlx, mlx_vlm and the
text model that lies beside it; it computes nothing that either of them computes already.
"""

from .config import ModelConfig, TextConfig, VisionConfig
from .language import LanguageModel
from .model import Model

__all__ = ["LanguageModel", "Model", "ModelConfig", "TextConfig", "VisionConfig"]
