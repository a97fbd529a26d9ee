"""Headers: one test for each defect, and every encoded header reads back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from kimi_k3_mlx.errors import CheckpointError
from kimi_k3_mlx.schema import DTYPE_BYTES, TensorInfo
from kimi_k3_mlx.tensors.header import encode_header, parse_header, read_header

GOOD = {
    "a": {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [6, 14]},
}


def write(path: Path, header: bytes, n_data: int, length: int | None = None) -> Path:
    size = len(header) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + header + bytes(n_data))
    return path


def changed(name: str, **fields: Any) -> bytes:
    return json.dumps(GOOD | {name: GOOD[name] | fields}).encode()


def test_a_good_file(tmp_path: Path) -> None:
    raw = json.dumps(GOOD | {"__metadata__": {"format": "pt"}}).encode()
    header = read_header(write(tmp_path / "x.safetensors", raw, 14))
    assert header.tensors == (
        TensorInfo("a", "U8", (2, 3), 0, 6),
        TensorInfo("b", "F32", (2,), 6, 14),
    )
    assert (header.metadata, header.n_bytes, header.n_data) == ({"format": "pt"}, 8 + len(raw), 14)


DEFECTS: list[tuple[bytes, str]] = [
    (b'{"__metadata__": ["pt"]}', "x has a __metadata__ that is not a JSON object"),
    (b"\xff\xfe", "header that is not JSON"),
    (b'{"a": ', "header that is not JSON"),
    (b"[1, 2]", "not a JSON object"),
    (b'{"a": {"dtype": "U8", "shape": [2]}}', "tensor a has no dtype, shape and offsets"),
    (b'{"a": 3}', "tensor a has no dtype, shape and offsets"),
    (changed("a", data_offsets=[0]), "tensor a has no dtype, shape and offsets"),
    (changed("a", dtype="F5"), "tensor a has the unknown dtype F5"),
    (changed("a", dtype=["U8"]), r"tensor a has the unknown dtype \['U8'\]"),
    (changed("a", shape=[-2, -3]), "tensor a has a shape or offset that is not a whole number"),
    (changed("a", shape=[2.0, 3]), "tensor a has a shape or offset that is not a whole number"),
    (changed("a", shape=[2, 4]), r"offsets 0:6 hold 6 bytes in x, but U8 \[2, 4\] takes 8"),
    (changed("b", data_offsets=[5, 13]), "tensor b overlaps tensor a by 1 bytes"),
    (changed("b", data_offsets=[8, 16]), "gap of 2 bytes between tensor a and tensor b"),
    (changed("a", data_offsets=[20, 26]), "gap of 6 bytes between the start and tensor b"),
]


@pytest.mark.parametrize(("raw", "message"), DEFECTS)
def test_each_defect_of_the_json_has_its_sentence(raw: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_header(raw, "x")


def test_a_header_may_be_empty() -> None:
    header = parse_header(b"{}", "x")
    assert (header.tensors, header.n_data) == ((), 0)


def test_equal_shapes_are_one_object() -> None:
    third = {"c": {"dtype": "I8", "shape": [2, 3], "data_offsets": [14, 20]}}
    a, _, c = parse_header(json.dumps(GOOD | third).encode(), "x").tensors
    assert a.shape is c.shape


def test_metadata_may_be_null() -> None:
    assert parse_header(b'{"__metadata__": null}', "x").metadata == {}


def test_too_short_for_a_length(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"12345")
    with pytest.raises(CheckpointError, match=r"x.safetensors is too short.*8 bytes .*5 found"):
        read_header(path)


def test_a_header_too_large_to_be_one(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", b"{}", 0, length=1 << 40)
    with pytest.raises(CheckpointError, match="announces a header of 1,099,511,627,776 bytes"):
        read_header(path)


def test_truncated_in_the_header(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", b"{}", 0, length=100)
    with pytest.raises(CheckpointError, match="truncated in its header: 108 bytes expected, 10 "):
        read_header(path)


@pytest.mark.parametrize(
    ("n_data", "message"),
    [(13, "truncated: {} bytes expected, {} found"), (15, "has 1 bytes after its last tensor")],
)
def test_a_file_of_the_wrong_length(tmp_path: Path, n_data: int, message: str) -> None:
    raw = json.dumps(GOOD).encode()
    path = write(tmp_path / "x.safetensors", raw, n_data)
    expected = message.format(8 + len(raw) + 14, 8 + len(raw) + n_data)
    with pytest.raises(CheckpointError, match=expected):
        read_header(path)


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[TensorInfo]:
    names = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=6))
    tensors, begin = [], 0
    for name in names:
        dtype = draw(st.sampled_from(["U8", "BF16", "F32", "U32", "I64"]))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        n_elements = 1
        for size in shape:
            n_elements *= size
        end = begin + n_elements * DTYPE_BYTES[dtype]
        tensors.append(TensorInfo(name, dtype, shape, begin, end))
        begin = end
    return [tensor for tensor in tensors if tensor.name != "__metadata__"]


@given(tensor_lists(), st.sampled_from([8, 64, 16384]))
def test_encoded_headers_read_back(tensors: list[TensorInfo], align: int) -> None:
    encoded = encode_header(tensors, {"format": "mlx"}, align)
    header = parse_header(encoded[8:], "x")
    assert sorted(header.tensors) == sorted(tensors)
    assert header.n_bytes == len(encoded) == int.from_bytes(encoded[:8], "little") + 8
    assert len(encoded) % align == 0


def test_the_reference_library_reads_a_padded_header() -> None:
    info = TensorInfo("a", "F32", (2,), 0, 8)
    data = encode_header([info], {"format": "mlx"}, 16384) + b"\0\0\x80\x3f" * 2
    assert load(data)["a"].tolist() == [1.0, 1.0]
