"""Caches of a Kimi-K3 that can go back: take back their last tokens, as drafts and prompts need.

A KV cache forgets tokens by moving its end. The state of a KDA layer is a sum that can't be undone,
so `RewindableCache` also keeps the state before the last tokens and the inputs of the recurrence
since then, and runs these again. Input: a model of `kimi_k3`. Output: caches with the methods that
mlx-lm calls. Costs a second state and up to 2 × window inputs: in Kimi-K3, 434 MB and 6.8 MB a
token (bfloat16), for a sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import ArraysCache, dynamic_roll

from kimi_k3 import PADDING
from kimi_k3_mlx.errors import KimiError, UsageError

WINDOW = 32
"""Tokens that can always be taken back, if the cache has seen as many."""

Array = Any
Recur = Callable[..., Sequence[Array]]
"""`DeltaAttention.recur` of the layer: (qkv, a, b, conv_state, state, lengths) → y, new states."""


class RewindableCache(ArraysCache):  # type: ignore[misc]
    """The cache of one KDA layer, whose last `window` tokens can be trimmed.

    `base` and `cache` are [the convolution's last inputs [B, taps - 1, 3W], state [B, H, D, D]],
    before the first record and now. `records` are pieces: qkv [B, n, 3W], a [B, n, W], b [B, n, H].
    After a trim the present is unknown (`stale`) until the next tokens run, or `refresh`.
    """

    cache: list[Array]
    left_padding: Array
    lengths: Array

    def __init__(self, window: int = WINDOW, left_padding: list[int] | None = None) -> None:
        super().__init__(2, left_padding)
        self.window = window
        self.base: list[Array] = [None, None]
        self.records: list[Sequence[Array]] = []
        self.kept = 0
        """Tokens that the records hold; counting them for every token would cost more than they."""
        self.room = 0
        """How many tokens `trim` can take back: of every row of a batch."""
        self.right_padding = 0

    @property
    def stale(self) -> bool:
        """Whether the present follows from the base and the records only."""
        return self.cache[1] is None and self.base[1] is not None

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return int(self.base[1].shape[0] if self.stale else super().batch_size)

    def empty(self) -> bool:
        """Whether it has seen no token."""
        return self.base[1] is None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [*self.cache, *self.base, *(x for piece in self.records for x in piece)]
        return sum(x.nbytes for x in arrays if x is not None)

    def run(self, recur: Recur, *inputs: Array) -> Array:
        """y of the new tokens: one call of `recur`; when the records are full, one for the base and
        one from there, over all that is kept."""
        n_new = inputs[0].shape[1]
        if self.stale or self.kept + n_new > 2 * self.window:
            y = self.replay(recur, [*self.records, inputs], n_new)[:, -n_new:]
        else:
            y, *self.cache = recur(*inputs, *self.cache, self.lengths)
            self.records = [*self.records, inputs]
            self.kept += n_new
        if self.empty():
            self.base = [mx.zeros_like(x) for x in self.cache]
        self.room = min(self.room + n_new, self.kept)
        self.advance(n_new)
        return y

    def replay(self, recur: Recur, records: list[Sequence[Array]], n_new: int = 0) -> Array:
        """y of all records, from the base; moves the base when they are too many."""
        rows = join(records)
        n = rows[0].shape[1]
        cut = n - self.window if n > 2 * self.window else 0
        lengths = None if self.lengths is None else self.lengths + (n - n_new)
        ys = []
        if cut:
            y, *self.base = recur(*(x[:, :cut] for x in rows), *self.base, lengths)
            lengths = None if lengths is None else lengths - cut
            # Without the copy, a view would keep the inputs of a whole prefill step.
            rows = [mx.contiguous(x[:, cut:]) for x in rows]
            ys.append(y)
        y, *self.cache = recur(*rows, *self.base, lengths)
        self.records, self.kept = [rows], n - cut
        return mx.concatenate([*ys, y], axis=1)

    def refresh(self, recur: Recur) -> None:
        """Make the present known again after a trim."""
        if self.stale:
            self.replay(recur, self.records)

    def is_trimmable(self) -> bool:
        """True: a trim that goes too far back is an error, see `trim`."""
        return True

    def trim(self, n: int) -> int:
        """Take back n tokens; raises KimiError, before any change, when that is too many."""
        if n > (self.room if self.lengths is None else 0):
            raise KimiError(
                f"the cache can take back {self.room} tokens, not {n}.",
                "compute the prompt anew, or make the cache with a larger window.",
            )
        if n:
            self.kept -= n
            rows = [x[:, : self.kept] for x in join(self.records)]
            self.records = [rows] if self.kept else []
            self.cache = [None, None] if self.kept else list(self.base)
            self.room -= n
        return n

    @property
    def state(self) -> tuple[Any, ...]:
        """What a file holds; mlx-lm also evaluates it."""
        self.records = [join(self.records)] if self.records else []
        rows = self.records[0] if self.records else [None] * 3
        left = (self.left_padding, self.lengths, self.window, self.room, self.right_padding)
        return self.cache, self.base, rows, *left

    @state.setter
    def state(self, value: Sequence[Any]) -> None:
        self.cache, self.base, rows, *left = value
        self.left_padding, self.lengths, self.window, self.room, self.right_padding = left
        self.records = [] if rows[0] is None else [rows]
        self.kept = 0 if rows[0] is None else rows[0].shape[1]

    def filter(self, batch_indices: list[int]) -> None:
        """Keep these rows of the batch."""
        super().filter(batch_indices)
        self.base = [x if x is None else x[batch_indices] for x in self.base]
        self.records = [[x[batch_indices] for x in piece] for piece in self.records]

    def extract(self, idx: int) -> RewindableCache:
        """One row of the batch, as a cache of its own."""
        row = copy.copy(self)
        row.filter([idx])
        row.left_padding = row.lengths = None
        return row

    def extend(self, other: RewindableCache) -> None:
        """Append the rows of another batch."""
        self.take([self, other])

    @classmethod
    def merge(cls, caches: list[RewindableCache]) -> RewindableCache:
        """A batch of all the rows."""
        merged = cls(min(c.window for c in caches))
        merged.take(caches)
        return merged

    def take(self, caches: list[RewindableCache]) -> None:
        """Become all rows of `caches`, with what every one of them can take back."""
        sizes = [c.batch_size for c in caches]
        paddings = [c.left_padding for c in caches]
        used = [c for c in caches if not c.empty()]
        if not used or any(padding is not None for padding in paddings):
            known = zip(paddings, sizes, strict=True)
            rows = [mx.zeros(size, mx.int32) if p is None else p for p, size in known]
            self.left_padding = mx.concatenate(rows)
        if not used:
            return
        like = max(used, key=lambda c: c.kept)
        stale, room = any(c.stale for c in used), min(c.room for c in caches)
        parts = [c.aligned(like, size) for c, size in zip(caches, sizes, strict=True)]
        bases, records, presents = zip(*parts, strict=True)
        self.base, rows = join(bases, axis=0), join(records, axis=0)
        self.records, self.kept = [rows] if rows else [], like.kept
        self.cache = [None, None] if stale else join(presents, axis=0)
        self.room = room

    def aligned(
        self, like: RewindableCache, size: int
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """Base, records and present in the shapes of `like`: padding comes first."""
        base, present = self.base, self.cache
        if self.empty():
            base = present = [mx.zeros((size, *x.shape[1:]), x.dtype) for x in like.base]
        missing = like.kept - self.kept
        if not missing:
            return base, join(self.records), present
        blank = [
            mx.full((size, missing, x.shape[-1]), padding, x.dtype)
            for x, padding in zip(like.records[0], PADDING, strict=True)
        ]
        rows = join([*self.records, blank])
        last_inputs, rows = padding_first(base[0], rows, mx.full(size, missing))
        return [last_inputs, base[1]], rows, present

    def prepare(self, lengths: list[int], **_: Any) -> None:
        """Expect rows of these lengths, padded on the right: mlx-lm's way of batching prompts."""
        super().prepare(lengths)
        self.right_padding = max(lengths) - min(lengths)

    def finalize(self) -> None:
        """The padded rows have all run: nothing may lie between a row's tokens and its next one."""
        if self.lengths is not None and self.records:
            padding = mx.clip(-self.lengths, 0, self.kept)
            last_inputs, rows = padding_first(self.base[0], join(self.records), padding)
            self.base, self.records = [last_inputs, self.base[1]], [rows]
            self.room = max(0, self.room - self.right_padding)
        super().finalize()


def join(pieces: Sequence[Sequence[Array]], axis: int = 1) -> list[Array]:
    """Arrays of the same kind in every piece, one behind the other."""
    return [
        x[0] if len(x) == 1 else mx.concatenate(list(x), axis) for x in zip(*pieces, strict=True)
    ]


def padding_first(
    last_inputs: Array, rows: list[Array], padding: Array
) -> tuple[Array, list[Array]]:
    """Move each row's trailing `padding` [B] tokens to its beginning.

    The convolution's last inputs stay before the first real token, and pass for inputs of padding.
    """
    qkv, a, b = rows
    n = last_inputs.shape[1]
    qkv = dynamic_roll(mx.concatenate([last_inputs, qkv], axis=1), padding, axis=1)
    a, b = (dynamic_roll(x, padding, axis=1) for x in (a, b))
    return qkv[:, :n], [qkv[:, n:], a, b]


def rewindable(caches: list[Any], window: int = WINDOW) -> list[Any]:
    """The same caches, those of KDA layers able to go back to here and `window` tokens at most."""
    if window < 1:
        raise UsageError(f"a window of {window} tokens can't go back.", "use 1 or more.")
    # mlx-lm's load_prompt_cache looks for a cache's class in its own module.
    mlx_lm_cache.RewindableCache = RewindableCache
    return [from_plain(c, window) if type(c) is ArraysCache else c for c in caches]


def from_plain(plain: ArraysCache, window: int) -> RewindableCache:
    """A cache that begins where `plain` is."""
    cache = RewindableCache(window)
    cache.cache, cache.base = list(plain.cache), list(plain.cache)
    cache.left_padding, cache.lengths = plain.left_padding, plain.lengths
    return cache


def snapshot(model: Any, caches: list[Any]) -> list[Any]:
    """A copy to keep, in mlx-lm's own classes: the present alone, half the bytes."""
    kept = []
    for layer, cache in zip(model.layers, caches, strict=True):
        plain = cache
        if isinstance(cache, RewindableCache):
            cache.refresh(layer.self_attn.recur)
            plain = ArraysCache(2)
            plain.cache = cache.cache
        kept.append(copy.deepcopy(plain))
    return kept


def check_kv_bits(text_config: dict[str, Any], group_size: int) -> None:
    """Raise UsageError when latents don't divide into groups, before anything is computed."""
    widths = {name: text_config[name] for name in ("kv_lora_rank", "qk_rope_head_dim")}
    if bad := [f"{name} {n}" for name, n in widths.items() if n % group_size]:
        smaller = group_size > 32 and not any(n % 32 for n in widths.values())
        raise UsageError(
            f"the latents of the cache can't be quantized in groups of {group_size}: "
            f"{' and '.join(bad)} of the config can't be divided by it.",
            "--kv-group-size 32, or leave out --kv-bits." if smaller else "leave out --kv-bits.",
        )
