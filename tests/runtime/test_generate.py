"""Generation: mlx-lm's own stream, our sampling options, honest numbers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from kimi_k3_mlx.errors import CheckpointError, UsageError
from kimi_k3_mlx.runtime import generate as module
from kimi_k3_mlx.runtime.draft import check_tokenizer, load_draft
from kimi_k3_mlx.runtime.generate import (
    Decoding,
    Sampling,
    eager_on_cpu,
    generate,
    weights_are_wired,
)
from kimi_k3_mlx.runtime.load import Loaded, load
from tests.tiny_k3 import TinyConfig, write_source


@pytest.fixture(scope="module")
def loaded(tiny_source: Path) -> Loaded:
    return load(tiny_source)


def test_pieces_add_up_to_the_text(loaded: Loaded) -> None:
    pieces: list[str] = []
    completion = generate(loaded, "def f(", Sampling(max_tokens=8), pieces.append)
    assert "".join(pieces) == completion.text
    assert (completion.prompt_tokens, completion.generation_tokens) == (6, 8)
    assert completion.finish_reason == "length"


def test_greedy_text_is_that_of_stock_mlx_lm(tiny_float_source: Path) -> None:
    """Our loader and stock's load the same weights, and generation is mlx-lm's in both."""
    from mlx_lm.generate import stream_generate
    from mlx_lm.utils import load_model

    stock, _ = load_model(tiny_float_source)
    ours = load(tiny_float_source)
    tokens = list(b"import ")
    stream = stream_generate(stock, ours.tokenizer, tokens, max_tokens=6)
    text = "".join(response.text for response in stream)
    assert generate(ours, "import ", Sampling(max_tokens=6)).text == text


def test_sampling_options_reach_the_sampler(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx_lm.sample_utils

    seen: dict[str, float] = {}
    make_sampler = mlx_lm.sample_utils.make_sampler

    def spy(**options: float) -> object:
        seen.update(options)
        return make_sampler(**options)

    monkeypatch.setattr(mlx_lm.sample_utils, "make_sampler", spy)
    generate(loaded, "x", Sampling(2, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=3))
    assert seen == {"temp": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}


def test_an_empty_prompt_is_refused(loaded: Loaded) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        generate(loaded, "", Sampling())


def test_warnings_of_mlx_lm_do_not_reach_stdout(
    loaded: Loaded, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # `mlx_lm.generate` as an attribute is the function of that name, not the module.
    mlx_lm_generate = importlib.import_module("mlx_lm.generate")
    stream_generate = mlx_lm_generate.stream_generate

    def loud(*args: object, **options: object) -> object:
        sys.stdout.write("[WARNING] close to the maximum recommended size")
        yield from stream_generate(*args, **options)

    monkeypatch.setattr(mlx_lm_generate, "stream_generate", loud)
    generate(loaded, "x", Sampling(2))
    out, err = capsys.readouterr()
    assert "WARNING" not in out
    assert "WARNING" in err


def test_on_a_cpu_nothing_is_wired_and_no_speed_is_known(loaded: Loaded) -> None:
    import mlx.core as mx

    if mx.metal.is_available():
        pytest.skip("this machine has a GPU")
    completion = generate(loaded, "x", Sampling(2))
    assert not weights_are_wired(loaded.model)
    assert completion.generation_tokens_per_second is None


def test_a_gpu_that_holds_the_model_gives_a_speed(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "weights_are_wired", lambda model: True)
    completion = generate(loaded, "x", Sampling(2))
    assert completion.generation_tokens_per_second > 0


@pytest.mark.parametrize(("limit", "wired"), [(10**9, True), (10**3, False), (None, False)])
def test_wired_means_within_the_working_set(
    limit: int | None, wired: bool, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    info = {} if limit is None else {"max_recommended_working_set_size": limit}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert weights_are_wired(loaded.model) is wired


def test_fusing_is_off_only_while_a_cpu_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    calls: list[str] = []
    monkeypatch.setattr(mx, "disable_compile", lambda: calls.append("off"))
    monkeypatch.setattr(mx, "enable_compile", lambda: calls.append("on"))
    with eager_on_cpu():
        pass
    assert calls == []  # the environment has decided already: MLX_DISABLE_COMPILE is set
    monkeypatch.delenv("MLX_DISABLE_COMPILE")
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with eager_on_cpu():
        assert calls == ["off"]
    assert calls == ["off", "on"]
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    with eager_on_cpu():
        pass
    assert calls == ["off", "on"]


# Decoding: how the text is computed changes nothing but its cost.

REPEATED = "def f(x): return x\n" * 3


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Float32 throughout, and latents that divide into groups of 32."""
    path = tmp_path_factory.mktemp("exact") / "source"
    return load(write_source(path, TinyConfig(vision=False, trunk_dtype="F32", qk_rope=32)))


@pytest.fixture(scope="module")
def plain(exact: Loaded) -> str:
    return generate(exact, REPEATED, Sampling(24), decoding=Decoding(lookup=False)).text


@pytest.mark.parametrize(
    "decoding",
    [
        Decoding(),
        Decoding(num_draft_tokens=40),
        Decoding(prefill_step_size=7),
        Decoding(kv_bits=8, kv_group_size=32, quantized_kv_start=10_000),
    ],
)
def test_greedy_text_does_not_depend_on_decoding(
    decoding: Decoding, exact: Loaded, plain: str
) -> None:
    assert generate(exact, REPEATED, Sampling(24), decoding=decoding).text == plain


def test_a_draft_model_that_agrees_saves_passes(exact: Loaded, plain: str) -> None:
    completion = generate(exact, REPEATED, Sampling(24), decoding=Decoding(draft=exact))
    assert completion.text == plain
    assert completion.tokens_from_drafts >= 12


def test_a_draft_model_that_is_wrong_changes_nothing(
    exact: Loaded, plain: str, loaded: Loaded
) -> None:
    decoding = Decoding(draft=loaded, num_draft_tokens=5)
    assert generate(exact, REPEATED, Sampling(24), decoding=decoding).text == plain


def test_quantized_latents_are_used(exact: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm.models.cache import KVCache

    calls: list[dict[str, int]] = []
    to_quantized = KVCache.to_quantized
    monkeypatch.setattr(
        KVCache, "to_quantized", lambda c, **o: calls.append(o) or to_quantized(c, **o)
    )
    decoding = Decoding(kv_bits=4, kv_group_size=32, quantized_kv_start=20)
    assert generate(exact, REPEATED, Sampling(4), decoding=decoding).generation_tokens == 4
    assert calls == [{"group_size": 32, "bits": 4}] * 2


def test_latents_that_do_not_divide_are_refused_before_prefill(loaded: Loaded) -> None:
    with pytest.raises(UsageError, match=r"groups of 64: qk_rope_head_dim 16 of the config"):
        generate(loaded, "x", Sampling(2), decoding=Decoding(kv_bits=8))


@pytest.mark.parametrize(("temperature", "lookup", "used"), [(0, None, True), (1, None, False)])
def test_lookup_is_for_greedy_text(
    temperature: float, lookup: bool | None, used: bool, loaded: Loaded
) -> None:
    model, _ = module.prepare(loaded, Sampling(temperature=temperature), Decoding(lookup))
    assert (model is not loaded.model) is used
    for asked in (True, False):
        model, _ = module.prepare(loaded, Sampling(temperature=temperature), Decoding(asked))
        assert (model is not loaded.model) is asked


def test_two_ways_of_drafting_are_one_too_many(loaded: Loaded) -> None:
    with pytest.raises(UsageError, match="both draft"):
        module.prepare(loaded, Sampling(), Decoding(lookup=True, draft=loaded))


def test_a_draft_model_may_be_a_small_kimi(tiny_float_source: Path, exact: Loaded) -> None:
    assert load_draft(tiny_float_source, exact.tokenizer).config["model_type"] == "kimi_k3"


class Words:
    """A tokenizer as far as it is compared."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


def test_another_tokenizer_is_refused() -> None:
    check_tokenizer(Words("a", "b"), Words("a", "b"))
    with pytest.raises(UsageError, match=r"it has 1 tokens, the build's 2\."):
        check_tokenizer(Words("a"), Words("a", "b"))
    with pytest.raises(UsageError, match=r"token 1 is 'c' in the build only"):
        check_tokenizer(Words("a", "b"), Words("a", "c"))


def test_a_folder_without_a_model_is_no_draft(tiny_float_source: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_float_source / name).read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="holds no model for mlx-lm"):
        load_draft(tmp_path, load(tiny_float_source).tokenizer)
