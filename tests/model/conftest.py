"""The GPU's branches without a GPU."""

import mlx.core as mx
import pytest

import kimi_k3


@pytest.fixture
def gpu_path(monkeypatch):
    """The branches and dtypes of the GPU, with every kernel replaced by its twin in operations.

    tests/metal runs the kernels themselves.
    """

    def mix(blocks, prefix, res_norm, res_proj, norm):
        return kimi_k3.attn_res_ops(blocks, prefix, res_norm, res_proj, norm, prefix.dtype)

    def scores(x, weight):
        return mx.sigmoid(x.astype(mx.float32) @ weight.astype(mx.float32).T)

    monkeypatch.setattr(kimi_k3, "on_gpu", lambda: True)
    monkeypatch.setattr(kimi_k3, "attn_res_metal", mix)
    monkeypatch.setattr(kimi_k3, "router_scores_metal", scores)
    monkeypatch.setattr(kimi_k3, "gated_delta_kernel", kimi_k3.gated_delta_ops)
