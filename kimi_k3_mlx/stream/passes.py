"""A micro-batch on its way through a decoder layer, whole or with the experts block by block.

Input: one of `kimi_k3`'s decoder layers and a state. Output: the state after it, and the taps.
With blocks, the layer's graph waits while the experts' outputs are written into memory that it
holds already. An expert computes each row by itself, so that blocks change no bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_attention_mask

from kimi_k3_mlx.stream.activations import State
from kimi_k3_mlx.stream.blocks import Block

OBSERVED = ("experts", "router_weights", "expert_output")


class Pass:
    """One micro-batch of one lane on its way through a layer: all of it is still to be computed."""

    def __init__(self, module: Any, state: State, tapped: bool) -> None:
        self.taps: dict[str, mx.array] = {}
        prefix, blocks = state
        mask = None
        if not module.is_linear:
            mask = create_attention_mask(prefix, None, return_array=True)
        prefix = module(prefix, blocks, mask, None, self._tap if tapped else None)
        self.state = State(prefix, blocks)

    def fill(self, block: Block) -> None:
        """Take a block of experts: a layer that has its own needs none."""

    def finish(self) -> State:
        """Compute it; `taps` then has what the layer showed."""
        mx.eval(self.state.arrays(), self.taps)
        return self.state

    def _tap(self, name: str, array: mx.array) -> None:
        if name in OBSERVED:
            self.taps[name] = array


class BlockPass(Pass):
    """A pass through an MoE layer without experts: `fill` it with each block, then finish."""

    def __init__(self, module: Any, state: State, tapped: bool) -> None:
        module.mlp.run_experts = self._wait
        super().__init__(module, state, tapped)
        mx.eval(self._rows, self._indices, self._held)
        self._chosen = np.array(self._indices).ravel().astype(np.int64)

    def fill(self, block: Block) -> None:
        """Write down what the block's experts say."""
        chosen = self._chosen - block.first
        slots = np.flatnonzero((chosen >= 0) & (chosen < block.size))
        slots = slots[np.argsort(chosen[slots], kind="stable")]
        if not len(slots):
            return
        rows = self._rows[mx.array(slots // self._indices.shape[-1])]
        outputs = block.experts(rows, mx.array(chosen[slots].astype(np.uint32)), ordered=True)
        outputs = outputs.reshape(len(slots), -1).view(self._held.dtype)
        target = np.array(self._held, copy=False).reshape(len(self._chosen), -1)
        target[slots] = np.array(outputs)

    def _wait(self, z: mx.array, indices: mx.array) -> mx.array:
        """In the place of `kimi_k3.SparseMoE.run_experts`: memory that is filled later."""
        self._rows, self._indices = z.reshape(-1, 1, z.shape[-1]), indices
        words = mx.float32 if z.dtype == mx.float32 else mx.uint16
        self._held = mx.zeros((*indices.shape, z.shape[-1]), words)
        return self._held.view(z.dtype)


def fill(passes: Sequence[Pass], blocks: Iterable[Block]) -> None:
    """Give all of them one block after the other."""
    for block in blocks:
        for one in passes:
            one.fill(block)
        del block  # before the one after the next is read
        mx.clear_cache()
