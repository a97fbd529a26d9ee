"""Safetensors bytes: headers, checkpoints, writers, the journal."""
