"""Convert, prune and run moonshotai/Kimi-K3 on Apple Silicon with MLX.

Importing this package costs nothing: every heavy import lives in the module that needs it.
"""

__version__ = "0.1.0"
