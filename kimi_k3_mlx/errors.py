"""The one family of errors: a fact with its numbers, a hint that is a command, an exit code.

Library code raises these; only `kimi_k3_mlx.cli` turns them into text and an exit status.
"""

from __future__ import annotations


class KimiError(Exception):
    """Something failed: `message` is one fact, `hint` says what to do about it."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckpointError(KimiError):
    """A checkpoint on disk is damaged, incomplete or not a Kimi-K3."""


class UsageError(KimiError):
    """The options, or the folder they name, can't be what the user meant."""

    exit_code = 2


class MismatchError(KimiError):
    """Verification found a build that differs from its source."""

    exit_code = 3


class DoesNotFitError(KimiError):
    """The disk or the memory is too small."""

    exit_code = 4


class HubError(KimiError):
    """The Hub or the network failed."""

    exit_code = 5


class InterruptedBuildError(KimiError):
    """Ctrl-C or a signal stopped a build between two shards; it can be continued."""

    exit_code = 130
