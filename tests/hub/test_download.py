"""What is asked of huggingface_hub, and how its refusals read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError

from kimi_k3_mlx.cli import main
from kimi_k3_mlx.errors import HubError, UsageError
from kimi_k3_mlx.hub.download import download


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Records the call instead of making it."""
    calls = []

    def snapshot(repository, **options):
        calls.append((repository, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return calls


def refuse(monkeypatch, error):
    def snapshot(repository, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)


def test_everything_by_default(asked, capsys, tmp_path):
    assert main(["download"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    options = {"revision": None, "local_dir": None, "allow_patterns": None}
    assert asked == [("moonshotai/Kimi-K3", options)]


def test_the_hint_of_a_truncated_shard_can_be_typed(asked, capsys, tmp_path):
    command = ["download", "--include", "model-00018*", "--local-dir", str(tmp_path), "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(tmp_path)
    assert asked[0][1]["allow_patterns"] == ["model-00018*"]
    assert asked[0][1]["local_dir"] == tmp_path


def test_unreachable(monkeypatch):
    refuse(monkeypatch, LocalEntryNotFoundError("no"))
    with pytest.raises(HubError, match="moonshotai/Kimi-K3 can't be reached") as caught:
        download("moonshotai/Kimi-K3")
    assert caught.value.exit_code == 5


def test_gated(monkeypatch):
    request = httpx2.Request("GET", "http://localhost")
    response = httpx2.Response(403, request=request)
    refuse(monkeypatch, GatedRepoError("Access is restricted.\nmore", response=response))
    with pytest.raises(HubError, match=r"^a/b: Access is restricted\.$"):
        download("a/b")


def test_no_repository(monkeypatch):
    refuse(monkeypatch, HFValidationError("no"))
    with pytest.raises(UsageError, match="'a b' is not a repository"):
        download("a b")


@pytest.mark.hub
@pytest.mark.slow
def test_offline_is_one_sentence_and_exit_5(tmp_path):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "kimi_k3_mlx", "download", "nobody/nothing"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 5, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("kimi-k3: error: nobody/nothing can't be reached")
