"""Conversion holds about one layer in memory, both ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.tools.convert.families import family_of
from megatron.tools.convert.import_hugging_face import read_config
from megatron.tools.convert.records import checkpoint_key, checkpoint_shapes, model_from_flags
from megatron.tools.convert.safetensors_file import Described, FolderWriter, plan_files, read_folder

LAYERS, HIDDEN, INNER = 12, 128, 8192
LAYER_BYTES = 4 * (3 * HIDDEN * INNER + 4 * HIDDEN * HIDDEN)
# What a process converts, after a small model that loads every module.
CONVERT = """
import sys
from pathlib import Path
from megatron.tools.convert.command import main

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

def convert(folder, name):
    for words in (("from-hugging-face", folder / name, folder / (name + "-ours")),
                  ("to-hugging-face", folder / (name + "-ours"), folder / (name + "-back"))):
        Path("/proc/self/clear_refs").write_text("5")
        before = peak()
        assert main([words[0], "--load", str(words[1]), "--save", str(words[2])]) == 0
        yield peak() - before

folder = Path(sys.argv[1])
list(convert(folder, "small"))
print(*convert(folder, "large"))
"""


def write_llama(folder: Path, layers: int, inner: int) -> None:
    folder.mkdir()
    values = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
    }
    values |= {"num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(values))
    config = read_config(folder / "config.json")
    family = family_of(config)
    model = model_from_flags(family.flags(config))
    shapes = checkpoint_shapes(model)
    described = {}
    for rule in family.weights(model).rules:
        parts = rule.form.split(torch.empty(shapes[checkpoint_key(rule.ours)], device="meta"))
        described |= {
            n: Described(tuple(p.shape), torch.float32) for n, p in zip(rule.theirs, parts, strict=True)
        }
    writer = FolderWriter(folder, described, plan_files(described, 10**10))
    for index, (name, item) in enumerate(described.items()):
        writer.write(name, torch.full(item.shape, float(index)))
    writer.close()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_peak_memory_is_about_a_layer(tmp_path: Path) -> None:
    write_llama(tmp_path / "small", 1, 256)
    write_llama(tmp_path / "large", LAYERS, INNER)
    command = [sys.executable, "-c", CONVERT, str(tmp_path)]
    # What is freed goes back at once: glibc would keep more the more was freed before.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    peaks = [int(word) for word in done.stdout.splitlines()[-1].split()]
    total = sum(info.num_bytes for info in read_folder(tmp_path / "large").values())
    assert total > LAYERS * LAYER_BYTES
    for peak in peaks:  # a layer, what is joined and split of it, and a page or two of the allocator's
        assert peak < 3 * LAYER_BYTES, f"peaks {peaks} of layers of {LAYER_BYTES}"
    assert (tmp_path / "large/model.safetensors").read_bytes() == (
        tmp_path / "large-back/model.safetensors"
    ).read_bytes()
