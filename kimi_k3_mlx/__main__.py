"""Lets `python -m kimi_k3_mlx` do what the installed `kimi-k3` does."""

from __future__ import annotations

import sys

from kimi_k3_mlx.cli import main

if __name__ == "__main__":
    sys.exit(main())
