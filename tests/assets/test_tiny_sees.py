"""The committed tiny K3 sees: it names colours and shapes on pictures that training never drew.

Pictures go through a build and the code that `kimi-k3 generate --image` runs; only decoding is a
loop of the test's own, for many pictures at a time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import kimi_k3_mlx
from kimi_k3_mlx.convert.plan import plan_build
from kimi_k3_mlx.convert.profiles import load_profile
from kimi_k3_mlx.convert.run import run
from kimi_k3_mlx.runtime.generate import Sampling, generate, picture_prompt
from kimi_k3_mlx.runtime.load import Loaded, load
from kimi_k3_mlx.runtime.vision import Eyes, load_vision
from kimi_k3_mlx.tensors.local import open_source, read_json
from kimi_k3_mlx.vision.images import open_image

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from tiny_pictures import PROMPT, SEEN, UNSEEN, Drawn, draw

ARTIFACT = Path(kimi_k3_mlx.__file__).parent / "assets" / "tiny-k3"
SIZES = ((85, 85), (112, 112), (88, 107), (111, 86))
ROWS = 24
"""Pictures of each size."""
FIRST_SEED = 500_000
"""Neither training nor results.json has these seeds."""
N_TOKENS = 13


class Eyed(NamedTuple):
    build: Loaded
    eyes: Eyes


@pytest.fixture(scope="module")
def eyed(tmp_path_factory: pytest.TempPathFactory) -> Eyed:
    """A build of the artifact, text and vision."""
    source, out = open_source(ARTIFACT), tmp_path_factory.mktemp("sees") / "build"
    run(plan_build(source, load_profile("mxfp4")), source, out)
    return Eyed(load(out, force=True), load_vision(out))


def pictures(pairs: tuple[tuple[str, str], ...], first: int) -> list[list[Drawn]]:
    """One list for each size."""
    return [
        [draw(first + ROWS * group + row, pairs, size) for row in range(ROWS)]
        for group, size in enumerate(SIZES)
    ]


def answers(eyed: Eyed, drawn: list[Drawn]) -> list[str]:
    """Greedy answers to pictures of one size, whose prompts are equally long."""
    build, eyes = eyed
    prompts = [picture_prompt(build, eyes, [d.image], PROMPT) for d in drawn]
    cache: list[Any] = make_prompt_cache(build.model)
    logits = build.model(
        mx.stack([p.ids for p in prompts]),
        cache=cache,
        input_embeddings=mx.stack([p.embeddings for p in prompts]),
    )
    steps = [logits[:, -1:].argmax(-1)]
    while len(steps) < N_TOKENS:
        steps.append(build.model(steps[-1], cache=cache)[:, -1:].argmax(-1))
    ends = set(build.tokenizer.eos_token_ids)
    texts = []
    for ids in mx.concatenate(steps, 1).tolist():
        end = next((i for i, token in enumerate(ids) if token in ends), len(ids))
        texts.append(build.tokenizer.decode(ids[:end]))
    return texts


def shares(drawn: list[Drawn], texts: list[str]) -> tuple[float, float]:
    """How many answers have the right colour, and how many the right shape."""
    words = [text.strip(" .").partition(" ") for text in texts]
    colours = [word[0] == d.colour for word, d in zip(words, drawn, strict=True)]
    shapes = [word[2] == d.shape for word, d in zip(words, drawn, strict=True)]
    return sum(colours) / len(drawn), sum(shapes) / len(drawn)


@pytest.fixture(scope="module")
def held_out(eyed: Eyed) -> tuple[list[Drawn], list[str]]:
    """96 pictures, and the answers."""
    groups = pictures(SEEN, FIRST_SEED)
    texts = [text for group in groups for text in answers(eyed, group)]
    return [drawn for group in groups for drawn in group], texts


def test_it_names_colours_and_shapes(held_out: tuple[list[Drawn], list[str]]) -> None:
    drawn, texts = held_out
    colours, shapes = shares(drawn, texts)
    assert colours > 0.7
    assert shapes > 0.45


def test_with_pictures_swapped_it_answers_by_chance(
    held_out: tuple[list[Drawn], list[str]],
) -> None:
    """Each question gets the answer to another's picture: 1 in 8 colours and 1 in 6 shapes."""
    drawn, texts = held_out
    half = len(drawn) // 2
    colours, shapes = shares(drawn, texts[half:] + texts[:half])
    assert colours < 0.3
    assert shapes < 0.35


def test_it_names_colours_of_pairs_that_training_never_showed(eyed: Eyed) -> None:
    """Their shapes it has not learnt to name: the card has the shares."""
    group = pictures(UNSEEN, FIRST_SEED + 10_000)[0]
    colours, _ = shares(group, answers(eyed, group))
    assert colours > 0.4


def test_the_example_is_answered_and_the_answer_ends(eyed: Eyed) -> None:
    image = open_image(ARTIFACT / "pictures" / "red-circle.png")
    prompt = picture_prompt(*eyed, [image], PROMPT)
    completion = generate(eyed.build, prompt, Sampling(max_tokens=20))
    assert completion.text.strip() == "red circle."
    assert completion.finish_reason == "stop"


def test_the_card_shows_the_measured_shares() -> None:
    card = (ARTIFACT / "README.md").read_text(encoding="utf-8")
    scores = read_json(ARTIFACT / "results.json")["vision"]["scores"]
    assert list(scores) == ["held_out", "unseen", "swapped"]
    for row in scores.values():
        assert f"| {row['pictures']} | {row['colour']} | {row['shape']} | {row['both']} |" in card
