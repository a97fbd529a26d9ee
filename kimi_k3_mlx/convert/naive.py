"""Where each source tensor must be found in a build, said a second time and without `converters`.

Input: the source's config, the profile, the prune plan, a source tensor. Output: `Form`s of build
tensors and the `Place`s in them that the tensor fills. Slow and plain: the oracle of `verify`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kimi_k3_mlx.convert.packing import mxfp4_as_bf16
from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.profile import Profile
from kimi_k3_mlx.prune_plan import PrunePlan
from kimi_k3_mlx.schema import DTYPE_BYTES, MXFP4, Json, Quantization, Span, TensorInfo

Array = NDArray[Any]
Slots = dict[int, int]
"""The place of each expert in a bank, by its original number."""
WORDS = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8, "U32": np.uint32}
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

_EXPERT = re.compile(r"(.*\.(\d+)\.)block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight_(\w+)")
_ROUTER = re.compile(r".*\.(\d+)\.block_sparse_moe\.gate\.(weight|e_score_correction_bias)")
_ATTENTION = re.compile(r"(.*\.self_attn\.)([qkv])_(proj|conv1d)\.weight")
_ROLES = {
    role: re.compile(rf"language_model\.(model\.)?({modules})\.weight")
    for role, modules in {
        "attention": r"layers\.\d+\.self_attn\.((qkv|q_a|q_b|g|o|f_a|f_b|b)_proj|embed_q|"
        r"unembed_out|kv_a_proj_with_mqa)",
        "dense_mlp": r"layers\.\d+\.mlp\.(gate|up|down)_proj",
        "embedding": "embed_tokens",
        "head": "lm_head",
        "latent": r"layers\.\d+\.mlp\.routed_expert_(down|up)_proj",
        "router": r"layers\.\d+\.mlp\.gate",
        "shared_expert": r"layers\.\d+\.mlp\.shared_experts\.(gate|up|down)_proj",
    }.items()
}
"""The matrices that a profile may quantize; everything else stays as it is."""


class Form(NamedTuple):
    """A build tensor, and how its values are stored: `dtype` and `shape` are those before that."""

    build: str
    dtype: str
    shape: tuple[int, ...]
    stored: Quantization | None = None
    padded: bool = False
    """Whether experts that don't exist follow those that do."""
    narrowed: bool = False
    """Whether the source has it in F32, and the build in BF16."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the values before they are quantized."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def parts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of the tensors that store it, by name."""
        if self.stored is None:
            return {self.build: (self.dtype, self.shape)}
        *outer, width = self.shape
        mode, bits, group_size = self.stored
        module, groups = self.build.removesuffix(".weight"), (*outer, width // group_size)
        weight = {self.build: ("U32", (*outer, width * bits // 32))}
        if mode != "affine":
            return weight | {f"{module}.scales": ("U8", groups)}
        return weight | {f"{module}.{part}": (self.dtype, groups) for part in ("scales", "biases")}


class Place(NamedTuple):
    """Part of a build tensor that one source tensor must fill."""

    begin: int
    """First byte inside the values of the build tensor, not quantized."""
    n_bytes: int
    source: str
    spans: tuple[Span, ...]
    values: Callable[[bytes], bytes] | None = None
    """The expected bytes from those of the spans; None: the same."""
    expert: tuple[int, int] | None = None
    """Layer and original number, if it is an expert's."""


class Layout:
    """The places of every source tensor in a build of one profile under one plan."""

    def __init__(self, config: Json, profile: Profile, prune: PrunePlan | None) -> None:
        self.profile = profile
        self._text = config["text_config"]
        self._prune = prune
        self._is_padded = prune is not None and prune.pad_uniform
        self._largest = self._text["num_experts"]
        if prune:
            self._largest = max(len(layer.keep) for layer in prune.layers.values())
        self._banks: dict[int, tuple[Slots, Slots]] = {}

    def places(self, tensor: TensorInfo) -> Iterator[tuple[Form, Place]]:
        """Every place of a source tensor; none for an expert that goes."""
        if expert := _EXPERT.fullmatch(tensor.name):
            verbatim = self.profile.layout == "moonshot"
            yield from (self._renumbered if verbatim else self._expert)(tensor, expert)
        elif self._prune and (router := _ROUTER.fullmatch(tensor.name)):
            yield self._router_rows(tensor, int(router[1]))
        elif self.profile.layout == "moonshot":
            yield _whole(tensor, tensor.name, tensor.shape)
        else:
            yield from self._trunk(tensor)

    def banks(self, layer: int) -> tuple[Slots, Slots]:
        """The experts of a layer's first bank and of its second one, ascending."""
        if layer not in self._banks:
            keep, low = set(range(self._largest)), set[int]()
            if self._prune:
                keep, low = set(self._prune.layers[layer].keep), set(self._prune.layers[layer].low)
            self._banks[layer] = _slots(keep - low), _slots(low)
        return self._banks[layer]

    def _trunk(self, tensor: TensorInfo) -> Iterator[tuple[Form, Place]]:
        name = tensor.name
        if part := _ATTENTION.fullmatch(name):
            yield self._stored(*_query_key_value(tensor, part))
        elif name.endswith(".self_attn.A_log"):
            heads = self._text["linear_attn_config"]["num_heads"]
            yield _whole(tensor, name, (heads,), partial(_heads, name, heads))
        elif name.endswith(".kv_b_proj.weight"):
            for form, place in _absorbed(tensor, self._text):
                yield self._stored(form, place)
        else:
            yield self._stored(*_whole(tensor, build_name(name), tensor.shape))

    def _stored(self, form: Form, place: Place) -> tuple[Form, Place]:
        """The same, quantized or narrowed as the profile says."""
        module = form.build.removesuffix(".weight")
        role = next((role for role, names in _ROLES.items() if names.fullmatch(form.build)), None)
        if role:
            stored = self.profile.format_of(module, role)
            fits = stored is not None and form.shape[-1] % stored.group_size == 0
            return form._replace(stored=stored if fits else None), place
        if form.dtype == "F32" and module.endswith(tuple(f".{n}" for n in self.profile.narrow)):
            return form._replace(dtype="BF16", narrowed=True), place._replace(
                begin=place.begin // 2,
                n_bytes=place.n_bytes // 2,
                values=partial(_nearest_even, place.values),
            )
        return form, place

    def _expert(self, tensor: TensorInfo, match: re.Match[str]) -> Iterator[tuple[Form, Place]]:
        prefix, layer, number, matrix, part = match.groups()
        first, second = self.banks(int(layer))
        expert = int(number)
        if expert not in first and expert not in second:
            return
        bank, experts, stored = "switch_mlp", first, self.profile.experts
        if expert in second and self._prune and self._prune.low:
            bank, experts, stored = "switch_mlp_low", second, self._prune.low
        count = self._largest if self._is_padded else len(experts)
        module = f"{prefix}mlp.{bank}.{PROJECTIONS[matrix]}"
        slot, where = experts[expert], (int(layer), expert)
        out, width = tensor.shape
        if stored != MXFP4:
            if part == "packed":
                yield self._requantized(tensor, f"{module}.weight", count, stored, slot, where)
            return
        name, dtype, shape = f"{module}.weight", "U32", (count, out, width // 4)
        if part == "scale":
            name, dtype, shape = f"{module}.scales", "U8", (count, out, width)
        place = Place(slot * tensor.n_bytes, tensor.n_bytes, tensor.name, _all(tensor), None, where)
        yield Form(name, dtype, shape, padded=self._is_padded), place

    def _requantized(
        self,
        tensor: TensorInfo,
        name: str,
        count: int,
        stored: Quantization,
        slot: int,
        where: tuple[int, int],
    ) -> tuple[Form, Place]:
        out, n_packed = tensor.shape
        scales = tensor.name.removesuffix("packed") + "scale"
        spans = (*_all(tensor), Span(scales, 0, tensor.n_bytes // 16))
        n_bytes = 4 * tensor.n_bytes

        def values(data: bytes) -> bytes:
            return mxfp4_as_bf16(data[: tensor.n_bytes], data[tensor.n_bytes :])

        form = Form(name, "BF16", (count, out, 2 * n_packed), stored, self._is_padded)
        return form, Place(slot * n_bytes, n_bytes, tensor.name, spans, values, where)

    def _renumbered(self, tensor: TensorInfo, match: re.Match[str]) -> Iterator[tuple[Form, Place]]:
        _, layer, number, *_ = match.groups()
        kept, _ = self.banks(int(layer))
        if int(number) in kept:
            name = tensor.name.replace(f".experts.{number}.", f".experts.{kept[int(number)]}.")
            form, place = _whole(tensor, name, tensor.shape)
            yield form, place._replace(expert=(int(layer), int(number)))

    def _router_rows(self, tensor: TensorInfo, layer: int) -> tuple[Form, Place]:
        first, second = self.banks(layer)
        experts = [*first, *second]
        row = tensor.n_bytes // tensor.shape[0]
        spans = tuple(Span(tensor.name, at * row, (at + 1) * row) for at in experts)
        place = Place(0, row * len(experts), tensor.name, spans)
        if self.profile.layout == "moonshot":
            return Form(tensor.name, tensor.dtype, (len(experts), *tensor.shape[1:])), place
        count = self._largest if self._is_padded else len(experts)
        shape = (count, *tensor.shape[1:])
        return self._stored(
            Form(build_name(tensor.name), tensor.dtype, shape, padded=self._is_padded), place
        )


def _slots(experts: set[int]) -> Slots:
    return {expert: slot for slot, expert in enumerate(sorted(experts))}


def build_name(name: str) -> str:
    """A source tensor's name in a build, if it is no expert's and nothing is fused."""
    name = name.replace(".gate.e_score_correction_bias", ".e_score_correction_bias")
    return name.replace(".block_sparse_moe.", ".mlp.")


def _all(tensor: TensorInfo) -> tuple[Span, ...]:
    return (Span(tensor.name, 0, tensor.n_bytes),)


def _whole(
    tensor: TensorInfo,
    name: str,
    shape: tuple[int, ...],
    values: Callable[[Array], Array] | None = None,
    begin: int = 0,
    n_bytes: int | None = None,
) -> tuple[Form, Place]:
    """A whole source tensor; `values` takes and gives arrays."""
    form = Form(name, tensor.dtype, shape)
    n_bytes = form.n_bytes if n_bytes is None else n_bytes
    change = values and partial(_changed, tensor, values)
    return form, Place(begin, n_bytes, tensor.name, _all(tensor), change)


def _changed(tensor: TensorInfo, values: Callable[[Array], Array], data: bytes) -> bytes:
    return values(np.frombuffer(data, WORDS[tensor.dtype]).reshape(tensor.shape)).tobytes()


def _nearest_even(before: Callable[[bytes], bytes] | None, data: bytes) -> bytes:
    """F32 as BF16: the nearer of two neighbours, the even one of two that are equally near."""
    words = np.frombuffer(before(data) if before else data, np.uint32)
    lower, rest = words >> 16, words & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (lower % 2 == 1))
    nearest: NDArray[np.uint16] = (lower + up).astype(np.uint16)
    return nearest.tobytes()


def _heads(name: str, heads: int, values: Array) -> Array:
    for index in range(heads, len(values)):
        if values[index] != 0:
            raise CheckpointError(
                f"tensor {name}: element {index} is {values[index]}, "
                f"expected 0 after the {heads} heads.",
                "the checkpoint is not a Kimi-K3 that this version knows.",
            )
    return values[:heads]


def _query_key_value(tensor: TensorInfo, match: re.Match[str]) -> tuple[Form, Place]:
    attention, letter, kind = match.groups()
    begin, n_bytes = "qkv".index(letter) * tensor.n_bytes, tensor.n_bytes
    rows = 3 * tensor.shape[0]
    if kind == "proj":
        shape: tuple[int, ...] = (rows, tensor.shape[1])
        return _whole(tensor, f"{attention}qkv_proj.weight", shape, None, begin, n_bytes)
    name, shape = f"{attention}qkv_conv.conv.weight", (rows, tensor.shape[2], 1)
    return _whole(tensor, name, shape, lambda values: np.moveaxis(values, 2, 1), begin, n_bytes)


def _absorbed(tensor: TensorInfo, text: Json) -> Iterator[tuple[Form, Place]]:
    heads, nope = text["num_attention_heads"], text["qk_nope_head_dim"]
    value, lora = text["v_head_dim"], tensor.shape[1]
    attention = tensor.name.removesuffix("kv_b_proj.weight")

    def keys(values: Array) -> Array:
        return np.transpose(values.reshape(heads, nope + value, lora)[:, :nope, :], (0, 2, 1))

    def rest(values: Array) -> Array:
        return values.reshape(heads, nope + value, lora)[:, nope:, :]

    yield _whole(tensor, f"{attention}embed_q.weight", (heads, lora, nope), keys)
    yield _whole(tensor, f"{attention}unembed_out.weight", (heads, value, lora), rest)


def element(dtype: str, shape: tuple[int, ...], data: bytes, at: int) -> tuple[str, float]:
    """Position and value of one element: `data` is the element, `at` its number."""
    words = np.frombuffer(data, WORDS[dtype])
    if dtype == "BF16":
        words = (words.astype(np.uint32) << 16).view(np.float32)
    position = tuple(map(int, np.unravel_index(at, shape))) if prod(shape) else ()
    return str(list(position)), words[0].item()
