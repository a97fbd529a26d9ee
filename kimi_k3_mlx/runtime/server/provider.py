"""The one build that a server serves, and its prompt caches, as mlx-lm's server asks for them.

Input: `Settings`. Output: mlx-lm's `ModelProvider`, which loads through our loader, in the thread
that generates; and its prompt cache's methods, on top of `Snapshots`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from threading import Event
from typing import Any

from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import ModelProvider

from kimi_k3_mlx.chat import marker_ids
from kimi_k3_mlx.chat.pieces import END
from kimi_k3_mlx.errors import InterruptedBuildError, KimiError, UsageError
from kimi_k3_mlx.runtime.build import check_build
from kimi_k3_mlx.runtime.cache import check_kv_bits
from kimi_k3_mlx.runtime.load import load, load_tokenizer
from kimi_k3_mlx.runtime.machine import Machine, Probes
from kimi_k3_mlx.runtime.server.prompt import Prompter
from kimi_k3_mlx.runtime.server.settings import Room, Settings, room_of
from kimi_k3_mlx.runtime.snapshots import Bounds, Snapshots, fingerprint
from kimi_k3_mlx.runtime.vision import Eyes, load_vision
from kimi_k3_mlx.schema import Progress, silent


class OneBuild(ModelProvider):  # type: ignore[misc]
    """Holds the build. `ready` is set when it is loaded, or `failure` says why it is not."""

    room: Room
    prompter: Prompter
    markers: dict[int, str]
    snapshots: Snapshots
    vocabulary: int

    def __init__(
        self, settings: Settings, progress: Progress = silent, probes: Probes | None = None
    ) -> None:
        super().__init__(settings)
        self.settings, self.progress = settings, progress
        self.probes = probes or Probes()
        self.ready = Event()
        self.stopping = False
        self.failure: KimiError | OSError | None = None
        self.eyes: Eyes | None = None

    def load_default(self) -> None:
        """Load the build, in the thread that generates."""
        try:
            super().load_default()
        except (KimiError, OSError) as error:
            self.failure = error
        self.ready.set()

    def _load(self, *key: Any) -> None:
        """What mlx-lm calls for the first request of a model, here once."""
        settings, path = self.settings, self.settings.model
        text_config = check_build(path).config["text_config"]
        if settings.kv_bits is not None:
            check_kv_bits(text_config, settings.kv_group_size)
        if settings.prompt_cache_dir is not None:
            settings.prompt_cache_dir.mkdir(parents=True, exist_ok=True)
        build = load(path, progress=self.report, probes=self.probes)
        self.model, self.tokenizer = build.model, build.tokenizer
        self.room = room_of(settings, build.config, Machine.read(path, self.probes))
        if build.config.get("vision_config"):
            self.eyes = self.open_eyes()
        self.prompter = Prompter(load_tokenizer(path, None), self.eyes)
        self.markers = marker_ids(self.tokenizer)
        self.tokenizer.add_eos_token(END)
        self.vocabulary = build.config["text_config"]["vocab_size"]
        self.snapshots = self.make_snapshots()
        caches = make_prompt_cache(self.model)
        self.is_batchable = settings.decode_concurrency > 1 and all(
            hasattr(cache, "merge") for cache in caches
        )
        self.model_key = key

    def report(self, done: int, total: int, what: str) -> None:
        """Progress of loading, which can be interrupted."""
        if self.stopping:
            raise InterruptedBuildError("interrupted.")
        self.progress(done, total, what)

    def open_eyes(self) -> Eyes | None:
        """The vision tower, if what it needs is installed."""
        if find_spec("PIL") is None:
            logging.warning('images are not served: they need pip install "kimi-k3-mlx[vision]"')
            return None
        try:
            return load_vision(self.settings.model)
        except UsageError as error:
            logging.warning("images are not served: %s", error.message)
            return None

    def make_snapshots(self) -> Snapshots:
        """The prompt caches, in RAM and perhaps on disk."""
        settings, folder = self.settings, self.settings.prompt_cache_dir
        cache = (settings.kv_bits, settings.kv_group_size, settings.quantized_kv_start)
        return Snapshots(
            self.model,
            fingerprint(settings.model, *(cache if settings.kv_bits else ())),
            Bounds(settings.prompt_cache_bytes, settings.prompt_cache_size),
            folder,
            None if folder is None else Bounds(settings.prompt_cache_dir_bytes),
            logging.warning,
        )


class PromptCaches:
    """mlx-lm's prompt cache, as its batches use it: what is kept are ends of messages."""

    def __init__(self, provider: OneBuild) -> None:
        self.provider = provider

    def __len__(self) -> int:
        return len(self.provider.snapshots.entries)

    @property
    def nbytes(self) -> int:
        """Bytes in RAM."""
        return self.provider.snapshots.n_bytes

    def stats_by_type(self) -> dict[str, Any]:
        """mlx-lm logs these; there is only one type."""
        return {}

    def fetch_nearest_cache(
        self, _model: Any, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, Sequence[int]]:
        """A copy of the caches of the longest known prefix, and the rest of the tokens."""
        caches, n = self.provider.snapshots.nearest(tokens)
        return caches, tokens[n:]

    def insert_cache(
        self, _model: Any, tokens: Sequence[int], caches: list[Any], *, cache_type: str = ""
    ) -> None:
        """Keep the caches, if a message ends here."""
        if not tokens or tokens[-1] != self.provider.prompter.end:
            return
        try:
            self.provider.snapshots.put(tokens, caches)
        except KimiError as error:
            logging.warning("a prompt cache was not kept: %s", error.message)

    def trim_to(self, *, n_bytes: int) -> None:
        """Make room for the caches of running requests."""
        snapshots = self.provider.snapshots
        while snapshots.entries and snapshots.n_bytes > n_bytes:
            snapshots.entries.popitem(last=False)
