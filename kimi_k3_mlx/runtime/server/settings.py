"""What a server is started with, and how many tokens it can hold.

Input: options by the names of mlx_lm.server, whose code reads them too; a build; a machine. Output:
`Settings`, and `Room`, which refuses what does not fit before anything is computed.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kimi_k3_mlx.convert.memory import MIB
from kimi_k3_mlx.errors import DoesNotFitError, UsageError
from kimi_k3_mlx.runtime.machine import Machine
from kimi_k3_mlx.runtime.server.request import RequestError
from kimi_k3_mlx.runtime.wired import memory_of, most_mb
from kimi_k3_mlx.schema import Json
from kimi_k3_mlx.units import format_bytes


@dataclass(frozen=True)
class Settings:
    """Options of the server; names and defaults are mlx-lm's where it has them."""

    model: Path
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ("*",)
    max_tokens: int = 8192
    """Of an answer to a request that names no number. mlx-lm's 512 would end in K3's thoughts."""
    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    lookup: bool | None = None
    """Prompt lookup; None: when greedy."""
    prefill_step_size: int = 4096
    decode_concurrency: int = 1
    """Sequences at once; mlx-lm's 32 take 434 MB each, and there are reports of kernel panics."""
    prompt_cache_size: int = 10
    prompt_cache_bytes: int = 8 << 30
    prompt_cache_dir: Path | None = None
    prompt_cache_dir_bytes: int = 64 << 30
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    wire: bool = True

    # What mlx-lm's server has and this one leaves out: it serves one build, as it is.
    adapter_path: ClassVar[None] = None
    draft_model: ClassVar[None] = None
    chat_template: ClassVar[str] = ""
    trust_remote_code: ClassVar[bool] = False
    pipeline: ClassVar[bool] = False

    @property
    def prompt_concurrency(self) -> int:
        """Prompts at once."""
        return self.decode_concurrency

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.model.resolve().name

    def check(self) -> None:
        """Raise UsageError for an address that others reach, without a key."""
        if self.api_key is None and not is_loopback(self.host):
            raise UsageError(
                f"--host {self.host} can be reached from other machines, and there is no key.",
                "add --api-key KEY, or leave out --host.",
            )
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise UsageError("--api-key is empty or not ASCII.", "make one: openssl rand -hex 24")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Room:
    """The most tokens of one sequence, and why."""

    n_tokens: int
    reason: str

    def for_answer(self, n_prompt: int, asked: int | None, default: int) -> int:
        """How many tokens an answer may have; raises RequestError when they don't fit."""
        wanted = n_prompt + (1 if asked is None else asked)
        if wanted > self.n_tokens:
            raise RequestError(
                f"{n_prompt:,} tokens of prompt and {wanted - n_prompt:,} of answer are "
                f"{wanted:,}, but {self.n_tokens:,} fit: {self.reason}.",
                "messages",
                code="context_length_exceeded",
            )
        return asked if asked is not None else min(default, self.n_tokens - n_prompt)


def room_of(settings: Settings, config: Json, machine: Machine) -> Room:
    """The smaller of the model's context and, on a Mac, of what the memory holds.

    Raises DoesNotFitError when not even one token fits.
    """
    context = Room(
        config["text_config"]["max_position_embeddings"], "that is the context of the model"
    )
    if not machine.is_mac:
        return context
    memory = memory_of(settings.model, 1, settings.decode_concurrency)
    most = most_mb(machine) * MIB
    # A cache that can go back keeps a second state.
    state = 2 * memory.n_state
    fixed = memory.n_weights + state + memory.n_activations + settings.prompt_cache_bytes
    n_tokens = (most - fixed) // memory.n_cache
    if n_tokens < 1:
        raise DoesNotFitError(
            f"weights, states and prompt caches take {format_bytes(fixed)}, but at most "
            f"{format_bytes(most)} can be wired.",
            "a smaller --prompt-cache-bytes or --decode-concurrency, or a smaller build.",
        )
    kept = format_bytes(settings.prompt_cache_bytes)
    reason = f"that is what this Mac's memory holds, with {kept} of prompt caches"
    return min(context, Room(n_tokens, reason), key=lambda room: room.n_tokens)
