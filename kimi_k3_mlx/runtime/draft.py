"""Loads a draft model: a small one that writes ahead what a large one then checks.

Input: a folder with any model that mlx-lm runs, or a small Kimi-K3, and the build that checks it.
Output: the model, if its tokens mean the same text and its cache can go back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.runtime.build import summary
from kimi_k3_mlx.runtime.load import Loaded, load, load_tokenizer
from kimi_k3_mlx.tensors.local import read_json
from kimi_k3_mlx.tensors.source import CONFIG


def load_draft(path: Path, tokenizer: Any) -> Loaded:
    """Load a draft model for a build with this tokenizer.

    Raises UsageError, before any weight is read, when the tokenizers differ, and when the draft
    model's cache can't be trimmed; CheckpointError for a folder that holds no model.
    """
    config = read_json(path / CONFIG)
    check_tokenizer(load_tokenizer(path, config.get("eos_token_id")), tokenizer)
    return load(path) if config.get("model_type") == "kimi_k3" else load_other(path)


def check_tokenizer(draft: Any, build: Any) -> None:
    """Compare the vocabularies: drafts are token ids."""
    ours, theirs = build.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    fact = f"it has {len(theirs):,} tokens, the build's {len(ours):,}"
    if len(ours) == len(theirs):
        token = min(ours.items() - theirs.items(), key=lambda item: item[1])
        fact = f"token {token[1]} is {token[0]!r} in the build only"
    raise UsageError(
        f"the draft model's tokenizer is another one: {fact}.",
        "take a draft model of the same family, or leave out --draft-model.",
    )


def load_other(path: Path) -> Loaded:
    """A model of mlx-lm's; code that lies beside it is never executed."""
    from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache
    from mlx_lm.utils import load_model

    try:
        model, config = load_model(path)
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"{path} holds no model for mlx-lm: {summary(error)}.") from error
    if not can_trim_prompt_cache(make_prompt_cache(model)):
        raise UsageError(
            f"the cache of the draft model in {path} can't go back.", "take another model."
        )
    return Loaded(model, None, config)
