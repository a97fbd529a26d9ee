"""Which small files a build carries: tokenizer and licence yes, the source's code never."""

from __future__ import annotations

from pathlib import Path

from kimi_k3_mlx.convert.sidecars import is_sidecar, is_verbatim, json_bytes, read_manifest

CARRIED = [
    "LICENSE",
    "THIRD_PARTY_NOTICES.md",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
]
LEFT = [
    "README.md",
    "config.json",
    "model-00001-of-000001.safetensors",
    "model.safetensors.index.json",
    "modeling_kimi_k3.py",
    "tokenization_kimi.py",
    "tokenizer_tools.py",
    ".gitattributes",
]


def test_what_is_carried() -> None:
    assert [name for name in CARRIED + LEFT if is_sidecar(name)] == CARRIED


def test_a_pruned_checkpoint_carries_its_code_but_not_the_card() -> None:
    """vLLM reads K3's own config and tokenizer code; the card describes the unpruned model."""
    carried = [name for name in CARRIED + LEFT if is_verbatim(name)]
    assert carried == [
        *CARRIED,
        "modeling_kimi_k3.py",
        "tokenization_kimi.py",
        "tokenizer_tools.py",
    ]


def test_json_is_readable_and_ends_in_a_newline() -> None:
    assert (
        json_bytes({"a": "公", "b": [1]}).decode() == '{\n  "a": "公",\n  "b": [\n    1\n  ]\n}\n'
    )


def test_only_a_finished_build_has_a_manifest(build: Path, tiny_source: Path) -> None:
    assert read_manifest(tiny_source) is None
    assert read_manifest(build) is not None
    (build / "config.json").unlink()
    assert read_manifest(build) is None
