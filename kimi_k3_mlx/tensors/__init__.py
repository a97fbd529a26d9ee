"""Safetensors bytes: headers, checkpoints on disk, ranged reads, crash-safe writes, the journal.

Nothing here imports mlx or numpy, and nothing knows what a tensor means.
"""
