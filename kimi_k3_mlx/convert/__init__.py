"""A checkpoint in, an MLX build out: plan, estimate, run, sidecars, verify.

`plan` decides, `estimate` refuses, `run` executes, `verify` compares. None of it imports mlx.
"""
