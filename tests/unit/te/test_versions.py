"""Older releases of TE: what the probe finds in them, and the grant table run on them.

Each release's pure wheel is downloaded once (a megabyte or two, without its dependencies) and put before the
installed one on PYTHONPATH of a pytest of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.pool import REPOSITORY_ROOT
from tests.te.engine import compiled

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(compiled(), reason="a compiled Transformer Engine is used instead"),
]

RELEASES = {
    "2.6.0.post1": {"get_main_grad"},
    "2.9.0": {"get_main_grad", "overwrite_modules", "overwrite_grouped", "overwrite_ops", "delayed_wgrad"},
    "2.12.0": {"get_main_grad", "overwrite_modules", "overwrite_grouped", "overwrite_ops", "delayed_wgrad"},
}
PROBE = """
import dataclasses, json
from tests.te.engine import load
load()
from megatron.models.backends.transformer_engine import probe
print("FOUND", json.dumps(dataclasses.asdict(probe("cpu"))))
"""


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> tuple[str, Path]:
    """(version, folder that holds its package)."""
    version = request.param
    root = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "megatron-nd-te-wheels"
    folder = root / version
    if not (folder / "transformer_engine").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        got = subprocess.run([*command, f"transformer_engine=={version}"], capture_output=True, text=True)
        if got.returncode:
            pytest.skip(f"transformer_engine {version} cannot be downloaded: {got.stderr.strip()[-200:]}")
    return version, folder


def run(folder: Path, *arguments: str, timeout: float) -> str:
    """Output of a Python process that sees the release in `folder`."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY_ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    return ended.stdout


def test_the_probe_finds_what_the_release_has(release: tuple[str, Path]) -> None:
    version, folder = release
    output = run(folder, "-c", PROBE, timeout=120)
    found = json.loads(output.split("FOUND", 1)[1])
    assert found["version"] == [int(part) for part in version.split(".")[:2]]
    for name in ("get_main_grad", "overwrite_modules", "overwrite_grouped", "overwrite_ops", "delayed_wgrad"):
        assert found[name] == (name in RELEASES[version]), name


def test_the_release_keeps_the_contract(release: tuple[str, Path]) -> None:
    """The table without --full. Where the release cannot overwrite, it runs with constant False."""
    run(release[1], "-m", "pytest", "-q", "tests/unit/te/test_grant_table.py", timeout=900)
