"""Fetches a checkpoint, or some files of one, from the Hub through huggingface_hub.

Input: a repository, file patterns, a folder. Output: the files in the folder, and its path. Files
that are there and unchanged are not fetched again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kimi_k3_mlx.errors import HubError, UsageError

DEFAULT_REPOSITORY = "moonshotai/Kimi-K3"


def download(
    repository: str,
    folder: Path | None = None,
    revision: str | None = None,
    include: Sequence[str] = (),
) -> Path:
    """Fetch files whose names match one of `include`, or all; into Hub's cache without `folder`.

    Raises HubError when the Hub refuses or can't be reached, UsageError for a malformed name.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(
            repository, revision=revision, local_dir=folder, allow_patterns=list(include) or None
        )
    except HFValidationError as error:
        raise UsageError(f"{repository!r} is not a repository: owner/name.") from error
    except LocalEntryNotFoundError as error:
        raise HubError(
            f"{repository} can't be reached, and is not in the cache.",
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, then run the same command again.",
        ) from error
    except HfHubHTTPError as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise HubError(
            f"{repository}: {reason}.", "check the name and your access: hf auth login"
        ) from error
    return Path(str(path))
