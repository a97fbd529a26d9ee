"""Tests of kimi_k3_mlx.chat."""
