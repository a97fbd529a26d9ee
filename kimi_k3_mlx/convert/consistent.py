"""Does a build's config.json describe the tensors that the build has?

Input: an opened build. Output: nothing, or MismatchError naming field, module or tensor. Reads no
tensor byte and needs no source.
"""

from __future__ import annotations

from collections.abc import Iterator

from converters.config import Dims, read_dims
from converters.names import BANKS, TABLE, Entry
from kimi_k3_mlx.convert.naive import Form
from kimi_k3_mlx.convert.wanted import AGAIN
from kimi_k3_mlx.errors import CheckpointError, MismatchError
from kimi_k3_mlx.schema import Json, Quantization
from kimi_k3_mlx.tensors.local import LocalSource

FLOATS = ("BF16", "F32")
PREFIXES = {"projector": "mm_projector.", "vision": "vision_tower.", "block": "vision_tower."}
"""Of the scopes that a build may lack altogether."""


def check_shapes(build: LocalSource) -> None:
    """Compare every tensor of an MLX build with the sizes, expert counts and `quantization` entries
    of its config; every entry must be about a quantized module that the build has.
    """
    try:
        dims = read_dims(build.config)
    except CheckpointError as error:
        raise MismatchError(error.message, AGAIN) from error
    check = _Check(build, dims)
    for name, shape in check.shapes():
        check.tensor(name, shape)
    for name in build.tensors:
        if name not in check.seen:
            raise MismatchError(f"tensor {name} is in no model that config.json describes.", AGAIN)
    for module in check.entries:
        if f"{module}.scales" not in build.tensors:
            raise _wrong(
                f"quantization names {module}", "which is no quantized module of this build"
            )


class _Check:
    """Goes through the modules of a config, and notes which tensors they account for."""

    def __init__(self, build: LocalSource, dims: Dims) -> None:
        self.seen: set[str] = set()
        self._build = build
        self._dims = dims
        block = build.config.get("quantization")
        if not isinstance(block, dict):
            raise _wrong(f"quantization is {str(block)[:40]}", "expected an object")
        self.entries = {name: value for name, value in block.items() if isinstance(value, dict)}
        self._default = {name: block[name] for name in block.keys() - self.entries.keys()}
        text = build.config["text_config"]
        self._counts = self._per_layer(text, "expert_counts", dims.n_experts)
        self._low = self._per_layer(text, "low_expert_counts", 0)
        if self._counts and max(self._counts.values()) != dims.n_experts:
            raise _wrong(
                f"text_config.num_experts is {dims.n_experts}",
                f"but the largest of expert_counts is {max(self._counts.values())}",
            )

    def _per_layer(self, text: Json, field: str, default: int) -> dict[int, int]:
        """The number for each MoE layer; the list counts dense layers too, as 0."""
        dims = self._dims
        if (values := text.get(field)) is None:
            return dict.fromkeys(dims.moe_layers, default)
        is_whole = isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)
        if not is_whole or len(values) != dims.n_layers:
            raise _wrong(
                f"text_config.{field} is {str(values)[:40]}", f"expected {dims.n_layers} numbers"
            )
        for layer in set(range(dims.n_layers)) - dims.moe_layers:
            if values[layer]:
                raise _wrong(
                    f"text_config.{field}[{layer}] is {values[layer]}", "but the layer is dense"
                )
        return {layer: values[layer] for layer in dims.moe_layers}

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape, not quantized, of every tensor that the config describes."""
        done = set()
        for entry in TABLE:
            if (entry.scope, entry.build) in done or entry.source.endswith("weight_scale"):
                continue
            done.add((entry.scope, entry.build))
            for numbers in self._numbers(entry.scope):
                yield from self._named(entry, numbers)

    def _numbers(self, scope: str) -> Iterator[tuple[int, ...]]:
        dims, every = self._dims, set(range(self._dims.n_layers))
        layers = {
            "layer": every,
            "kda": every - dims.mla_layers,
            "mla": set(dims.mla_layers),
            "dense": every - dims.moe_layers,
            "moe": set(dims.moe_layers),
            "expert": set(dims.moe_layers),
        }
        if scope in layers:
            yield from ((layer,) for layer in sorted(layers[scope]))
        elif scope == "global":
            yield ()
        elif dims.n_blocks and self._has(PREFIXES[scope]):
            yield from ((block,) for block in range(dims.n_blocks)) if scope == "block" else [()]

    def _has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._build.tensors)

    def _named(
        self, entry: Entry, numbers: tuple[int, ...]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        dims, sizes = self._dims, self._dims.sizes
        names = [name.format(*numbers) for name in entry.build]
        shape = dims.shapes(entry.shape)[-1]
        match entry.how:
            case "join":
                yield names[0], (3 * shape[0], shape[1])
            case "conv":
                yield names[0], (3 * shape[0], shape[2], 1)
            case "kv_b":
                yield names[0], (dims.heads, sizes["kv_lora"], dims.nope)
                yield names[1], (dims.heads, dims.value, sizes["kv_lora"])
            case "rows":
                yield names[0], (self._counts[numbers[0]], *shape[1:])
            case "stack":
                low = self._low[numbers[0]]
                for bank, count in zip(BANKS, (self._counts[numbers[0]] - low, low), strict=True):
                    if count:
                        name = names[0].replace(BANKS[0], bank)
                        yield name, (count, shape[0], 2 * shape[1])
            case _:
                yield names[0], shape

    def tensor(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor, quantized or not."""
        module = name.removesuffix(".weight")
        scales = self._build.tensors.get(f"{module}.scales")
        if scales is None or not name.endswith(".weight"):
            self._check(name, None, shape, "config.json")
            return
        stored = self._stored(module)
        dtype = scales.dtype if scales.dtype in FLOATS else "BF16"
        for part, (kind, size) in Form(name, dtype, shape, stored).parts().items():
            self._check(part, kind, size, f"config.json, {stored}")

    def _stored(self, module: str) -> Quantization:
        entry = self.entries.get(module, self._default)
        try:
            stored = Quantization(**entry)
            fits = stored.bits in range(1, 9) and stored.group_size in (16, 32, 64, 128)
        except TypeError as error:
            raise _wrong(f"quantization of {module} is {str(entry)[:60]}", str(error)) from error
        if not fits or stored.mode not in ("affine", "mxfp4", "mxfp8"):
            raise _wrong(f"quantization of {module} is {str(entry)[:60]}", "which MLX has not")
        return stored

    def _check(self, name: str, dtype: str | None, shape: tuple[int, ...], where: str) -> None:
        self.seen.add(name)
        found = self._build.tensors.get(name)
        if found is None:
            raise MismatchError(f"tensor {name} is missing; {where} describes it.", AGAIN)
        is_packed = dtype is None and found.dtype not in FLOATS
        if found.shape != shape or found.dtype != (dtype or found.dtype) or is_packed:
            wanted = f"{dtype or 'floats'} {shape}"
            raise MismatchError(
                f"tensor {name}: {found.dtype} {found.shape}, but {where} describes {wanted}.",
                AGAIN,
            )


def _wrong(found: str, but: str) -> MismatchError:
    return MismatchError(f"config.json: {found}, {but}.", AGAIN)
