"""The command line's fixtures, for verbs about the machine."""

from tests.cli.conftest import kimi, tiny_build

__all__ = ["kimi", "tiny_build"]
