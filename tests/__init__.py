"""Tests of kimi-k3-mlx. A package, so that `tests.tiny_k3` has one name everywhere."""
