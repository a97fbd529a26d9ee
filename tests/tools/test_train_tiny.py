"""The tiny K3's trainer: every fast path against a naive twin, the layout, the corpus split."""

# ruff: noqa: E402 (the programs import torch, so the skip must come first)

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the trainer is a developers' extra")
pytest.importorskip("tokenizers")

import tiny_corpus
import tiny_kda
import tiny_layers
import tiny_layout
import tiny_measure
import tiny_model
import tiny_mxfp4
from safetensors import safe_open
from tiny_corpus import BOS_ID, DOMAINS, EOS_ID, Corpus, Document
from torch import Tensor
from train_tiny import Schedule, Trainer, WindowSampler

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.fixture(autouse=True)
def _one_thread_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def naive_mxfp4(weight: np.ndarray) -> np.ndarray:
    """One value at a time: the smallest sufficient power of two, then the nearest code."""
    result = np.empty_like(weight)
    for group in np.ndindex(*weight.shape[:-1], weight.shape[-1] // 32):
        start = 32 * group[-1]
        row = weight[group[:-1]][start : start + 32]
        exponent = -127
        while np.abs(row).max() > 6.0 * 2.0**exponent:
            exponent += 1
        for i, value in enumerate(row):
            distance = [abs(abs(float(value)) / 2.0**exponent - code) for code in CODES]
            # Of two codes equally near, the even one.
            code = min(range(8), key=lambda c: (distance[c], c % 2))
            result[group[:-1]][start + i] = np.sign(value) * CODES[code] * 2.0**exponent
    return result


def awkward_weights() -> Tensor:
    """Random groups, and groups of ties, of zeros, of exact powers of two."""
    weight = torch.randn(4, 96) * 0.1
    weight[1, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0]).repeat(4)
    weight[2, 32:64] = 0.0
    weight[3] = torch.exp2(torch.arange(96.0) % 7 - 9)
    return weight


class TestQuantizer:
    def test_values_are_those_of_the_naive_quantizer(self) -> None:
        weight = awkward_weights()
        np.testing.assert_array_equal(tiny_mxfp4.mxfp4_values(weight), naive_mxfp4(weight.numpy()))

    def test_bytes_decode_to_the_trained_values(self) -> None:
        weight = awkward_weights()
        packed, scales = tiny_mxfp4.mxfp4_pack(weight)
        assert (packed.dtype, packed.shape) == (torch.uint8, (4, 48))
        assert (scales.dtype, scales.shape) == (torch.uint8, (4, 3))
        decoded = tiny_layout.unpack_mxfp4(packed, scales)
        np.testing.assert_array_equal(decoded, tiny_mxfp4.mxfp4_values(weight))

    def test_low_nibble_comes_first(self) -> None:
        weight = torch.zeros(1, 32)
        weight[0, 0], weight[0, 1] = 6.0, -0.5
        packed, scales = tiny_mxfp4.mxfp4_pack(weight)
        assert (int(packed[0, 0]), int(scales[0, 0])) == (0x97, 127)

    def test_gradient_passes_straight_through(self) -> None:
        weight = torch.randn(2, 32, requires_grad=True)
        tiny_mxfp4.straight_through_mxfp4(weight).sum().backward()
        assert torch.equal(weight.grad, torch.ones_like(weight))


def naive_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """One token after another, as in facts/K3.md 2.3."""
    state, outputs = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1]).double(), []
    for t in range(q.shape[2]):
        state = state * log_decay[:, :, t].exp().unsqueeze(-1)
        error = v[:, :, t] - (k[:, :, t].unsqueeze(-2) @ state).squeeze(-2)
        update = (beta[:, :, t].unsqueeze(-1) * error).unsqueeze(-2)
        state = state + k[:, :, t].unsqueeze(-1) * update
        outputs.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, 2)


def delta_rule_inputs() -> list[Tensor]:
    shape = (2, 3, 48, 8)
    q, k, v = (torch.randn(shape) for _ in range(3))
    decay = -5 * torch.sigmoid(3 * torch.randn(shape))
    return [q, tiny_kda.l2_normalise(k), v, decay, torch.rand(shape[:3])]


class TestFastPaths:
    def test_chunked_delta_rule_and_its_gradient(self) -> None:
        fast = [x.clone().requires_grad_() for x in delta_rule_inputs()]
        slow = [x.detach().double().requires_grad_() for x in fast]
        out, expected = tiny_kda.kda_chunked(*fast), naive_delta_rule(*slow)
        torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
        out.square().sum().backward()
        expected.square().sum().backward()
        for x, y in zip(fast, slow, strict=True):
            torch.testing.assert_close(x.grad, y.grad.float(), rtol=1e-3, atol=1e-4)

    def test_short_convolution_and_its_gradient(self) -> None:
        x = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
        padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
        expected = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), groups=5)
        convolve = tiny_kda._ShortConvolution.apply
        torch.testing.assert_close(convolve(x, weight), expected.transpose(1, 2))
        assert torch.autograd.gradcheck(convolve, (x, weight))

    def test_situ_and_its_gradient(self) -> None:
        gate, up = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
        expected = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
        torch.testing.assert_close(tiny_layers.situ(gate, up), expected)
        assert torch.autograd.gradcheck(tiny_layers.situ, (gate, up))

    def test_grouped_matmul_and_its_gradient(self) -> None:
        rows = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
        counts = [2, 0, 4, 1]
        multiply = tiny_model._GroupedMatmul.apply
        expected = torch.cat([x @ w for x, w in zip(rows.split(counts), weight, strict=True)])
        torch.testing.assert_close(multiply(rows, weight, counts), expected)
        assert torch.autograd.gradcheck(lambda r, w: multiply(r, w, counts), (rows, weight))

    def test_sorted_experts_are_the_plain_mixture(self) -> None:
        moe = tiny_model.LatentMoE(tiny_model.text_config())
        x = torch.randn(1, 5, 128)
        chosen, weights = moe.route(x[0])
        mixed = torch.zeros(5, 64)
        for token, slot in np.ndindex(*chosen.shape):
            expert = chosen[token, slot]
            gate, up = (moe.w13[expert] @ moe.down(x[0, token])).chunk(2)
            mixed[token] += weights[token, slot] * (moe.w2[expert] @ tiny_layers.situ(gate, up))
        expected = moe.up(moe.norm(mixed)) + moe.shared(x[0])
        torch.testing.assert_close(moe(x)[0], expected, rtol=1e-4, atol=1e-5)


class TestBalance:
    def test_bias_moves_towards_idle_experts(self) -> None:
        moe = tiny_model.LatentMoE(tiny_model.text_config())
        moe(torch.randn(2, 16, 128))
        moe.balance(0.01)
        bias, mean = moe.e_score_correction_bias, moe.load.mean()
        assert torch.equal(bias, 0.01 * torch.sign(mean - moe.load))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiny_model.TinyK3, Path]:
    torch.manual_seed(1)
    model = tiny_model.TinyK3(tiny_model.text_config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("export")
    tiny_layout.write_weights(model, folder)
    return model, folder


def stored_tensors(folder: Path) -> dict[str, tuple[str, list[int], str]]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as shard:
            for name in shard.keys():  # noqa: SIM118 (safe_open has no __iter__)
                part = shard.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape(), path.name)
    return found


class TestLayout:
    def test_shards_hold_one_layer_each(self, exported: tuple) -> None:
        stored = stored_tensors(exported[1])
        for name, (_, _, file_name) in stored.items():
            layer = int(name.split(".")[3]) if ".layers." in name else 6
            assert file_name == f"model-{layer + 1:05d}-of-000007.safetensors"

    def test_index_names_every_tensor_and_its_bytes(self, exported: tuple) -> None:
        index = json.loads((exported[1] / "model.safetensors.index.json").read_text())
        stored = stored_tensors(exported[1])
        sizes = {"BF16": 2, "F32": 4, "U8": 1}
        total = sum(sizes[dtype] * int(np.prod(shape)) for dtype, shape, _ in stored.values())
        assert index["metadata"] == {"total_size": total}
        assert index["weight_map"] == {name: file for name, (_, _, file) in stored.items()}

    @pytest.mark.parametrize(
        ("name", "dtype", "shape"),
        [
            ("layers.0.self_attn.q_conv1d.weight", "F32", [128, 1, 4]),
            ("layers.0.self_attn.A_log", "F32", [32]),
            ("layers.0.self_attn.dt_bias", "F32", [128]),
            ("layers.0.self_attn.o_norm.weight", "F32", [32]),
            ("layers.0.mlp.gate_proj.weight", "BF16", [384, 128]),
            ("layers.3.self_attn.kv_a_proj_with_mqa.weight", "BF16", [80, 128]),
            ("layers.3.mlp_res_proj.weight", "BF16", [1, 128]),
            ("layers.5.block_sparse_moe.gate.e_score_correction_bias", "F32", [64]),
            ("layers.5.block_sparse_moe.experts.63.w1.weight_packed", "U8", [64, 32]),
            ("layers.5.block_sparse_moe.experts.63.w2.weight_scale", "U8", [64, 2]),
        ],
    )
    def test_tensor(self, exported: tuple, name: str, dtype: str, shape: list[int]) -> None:
        assert stored_tensors(exported[1])[tiny_layout.PREFIX + name][:2] == (dtype, shape)

    def test_what_is_read_back_is_what_was_trained(self, exported: tuple) -> None:
        model, folder = exported
        loaded = tiny_layout.load_artifact(folder)
        for trained, read in zip(model.moes(), loaded.moes(), strict=True):
            assert torch.equal(tiny_mxfp4.mxfp4_values(trained.w13), read.w13)
            assert torch.equal(tiny_mxfp4.mxfp4_values(trained.w2), read.w2)
        for trained, read in zip(model.layers, loaded.layers, strict=True):
            rounded = trained.attention.o_proj.weight.bfloat16().float()
            assert torch.equal(rounded, read.attention.o_proj.weight)
        for name in ("A_log", "dt_bias", "conv"):
            trained, read = (getattr(m.layers[0].attention, name) for m in (model, loaded))
            assert torch.equal(trained, read)


def page(body: str) -> str:
    return f"<html><head><title>no</title></head><body>{body}</body></html>"


class TestCorpus:
    def test_split_is_by_document_and_repeatable(self) -> None:
        documents = [Document("code", f"module_{i}.py", "x") for i in range(2000)]
        held_out = [d.is_held_out for d in documents]
        assert held_out == [Document("code", d.name, "other text").is_held_out for d in documents]
        assert 0.02 < np.mean(held_out) < 0.06

    def test_no_prose_line_is_on_both_sides(self) -> None:
        lines = [f"sentence number {i} is here for the test." for i in range(60)]
        documents = [Document("english", f"{i}", "\n".join(lines[i : i + 30])) for i in range(30)]
        kept = list(tiny_corpus.without_repeats(documents, set()))
        texts = [line for d in kept for line in d.text.strip().split("\n")]
        assert len(texts) == len(set(texts))

    def test_listings_and_titles_are_no_prose(self) -> None:
        lines = tiny_corpus.page_lines(page("<p>One\n line.</p><pre>code()</pre><li>中 文</li>"))
        assert lines == ["One line.", "中文"]

    def test_control_tokens_are_in_the_order_of_k3(self) -> None:
        names = tiny_corpus.control_tokens()
        assert (len(names), names[0], names[1], names[31]) == (32, "[BOS]", "[EOS]", "[PAD]")
        assert names[8] == "<|reserved_token_1000|>"

    def test_tokenizer_round_trips_any_text(self) -> None:
        text = "def f(x):\n    return 'é 你好 \x00'\n"
        tokenizer = tiny_corpus.train_tokenizer([text, "some more text to merge, some more text"])
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    def test_documents_begin_and_end_with_control_tokens(self) -> None:
        tokenizer = tiny_corpus.train_tokenizer(["some text"])
        ids = tiny_corpus.encode_documents(tokenizer, [Document("code", "a", "some text")])[0]
        assert (ids[0], ids[-1]) == (BOS_ID, EOS_ID)


class TestSampler:
    def test_one_epoch_sees_every_window_once(self) -> None:
        tokens = {"code": np.arange(16 * 20 + 1, dtype=np.uint16)}
        sampler = WindowSampler(tokens, {"code": 1}, 16)
        starts = [int(sampler.batch()[0, 0]) for _ in range(19)]
        assert len(set(starts)) == 19
        assert {start % 16 for start in starts} == {starts[0] % 16}


class TestSchedule:
    def test_rate_warms_up_and_falls(self) -> None:
        schedule = Schedule(minutes=10, peak_rate=1.0)
        assert schedule.rate(0, 0.0) == pytest.approx(0.01)
        assert schedule.rate(500, 0.5) == pytest.approx(0.51)
        assert schedule.rate(500, 1.0) == pytest.approx(0.02)

    def test_bias_is_frozen_at_the_end(self) -> None:
        schedule = Schedule(minutes=10)
        rates = [schedule.bias_rate(step, share) for step, share in ((0, 0), (900, 0.5), (9, 0.96))]
        assert rates == [1e-2, 1e-3, 0.0]


def synthetic_corpus() -> Corpus:
    rng = np.random.default_rng(0)
    train = {domain: rng.integers(0, 992, 2000).astype(np.uint16) for domain in DOMAINS}
    return Corpus(None, train, {}, {}, {})


class TestTrainer:
    def test_resumed_run_takes_the_same_steps(self, tmp_path: Path) -> None:
        first, second = (Trainer(synthetic_corpus(), Schedule(10), 4, 32) for _ in range(2))
        first.step()
        first.save(tmp_path)
        second.restore(tmp_path)
        second.progress.seconds = first.progress.seconds
        assert second.progress.step == 1
        assert second.step() == pytest.approx(first.step(), rel=1e-5)

    def test_loss_falls_with_quantized_experts(self) -> None:
        trainer = Trainer(synthetic_corpus(), Schedule(10, 1e-2, 1, quantize_from=0.0), 2, 32)
        window = trainer.sampler.batch()
        trainer.sampler.batch = lambda: window
        losses = [trainer.step() for _ in range(8)]
        assert losses[-1] < losses[0] - 0.5


class TestMeasure:
    def test_windows_cover_every_prediction_once(self) -> None:
        ids = np.arange(40, dtype=np.uint16)
        windows = tiny_measure.document_windows([ids], 16)
        targets = windows[:, 1:][windows[:, 1:] != tiny_corpus.PAD_ID]
        assert targets.tolist() == list(range(1, 40))

    def test_divergence_of_equal_and_of_disjoint_loads(self) -> None:
        one, other = np.eye(4)[:1], np.eye(4)[1:2]
        assert tiny_measure.divergence_bits(one, one) == 0.0
        assert tiny_measure.divergence_bits(one, other) == 1.0
