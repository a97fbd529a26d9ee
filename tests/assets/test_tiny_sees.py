"""The committed tiny K3 sees: it names colours and shapes on pictures that training never drew.

Pictures and questions go through a build and the code that `kimi-k3 generate --image` runs.
"""

from __future__ import annotations

import json
import sys
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kimi_k3_mlx
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.runtime.generate import Sampling, generate, picture_prompt
from kimi_k3_mlx.runtime.images import open_image
from kimi_k3_mlx.runtime.load import Loaded, load
from kimi_k3_mlx.runtime.vision import Eyes, load_vision
from kimi_k3_mlx.tensors.local import open_source
