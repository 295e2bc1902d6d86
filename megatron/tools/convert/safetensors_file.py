"""Safetensors files, read and written one tensor at a time (https://github.com/huggingface/safetensors, "Format").

    8 bytes: length of the header, little endian
    header: JSON {name: {dtype, shape, data_offsets: [begin, end] after the header}}, spaces up to a multiple of 8
    tensors without gaps

A model is one file, or several and an index that says which tensor lies in which. Nothing is mapped: of a model,
only the tensors that were asked for are in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

# In the order of the library's enumeration, backwards: writers sort tensors by it, then by name.
DTYPES: dict[str, torch.dtype] = {
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: rank for rank, dtype in enumerate(DTYPES.values())}
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor on disk, and where it lies: bytes [begin, end) of `file`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    begin: int = 0
    end: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorInfo]:
    """What a safetensors file holds. Raises ValueError naming the file: missing, cut off or not of the format."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_LONGEST_HEADER, size - 8):
                raise ValueError(
                    f"{path} is no safetensors file, or is cut off at {size} bytes; fetch it again"
                )
            content = json.loads(file.read(length))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path} is no safetensors file: its header is not JSON") from None
    found = {
        name: _info(path, name, entry, 8 + length)
        for name, entry in content.items()
        if name != "__metadata__"
    }
    needed = max((info.end for info in found.values()), default=8 + length)
    if size != needed:
        raise ValueError(f"{path} has {size} bytes instead of {needed}: it is damaged; fetch it again")
    return found


def _info(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: the header's entry of {name} is damaged") from None
    if dtype not in DTYPES:
        raise ValueError(f"{path}: {name} has the dtype {dtype}, which is not supported")
    info = TensorInfo(shape, DTYPES[dtype], path, start + begin, start + end)
    if info.num_bytes != end - begin:
        raise ValueError(
            f"{path}: {name} of shape {list(shape)} {dtype} has {end - begin} bytes: damaged header"
        )
    return info


def read_tensor(info: TensorInfo) -> Tensor:
    """The tensor, in memory of its own. Raises ValueError naming the file if it ends too early."""
    data = torch.empty(info.num_bytes, dtype=torch.uint8)
    with info.file.open("rb") as file:
        file.seek(info.begin)
        if file.readinto(data.numpy().data) != info.num_bytes:
            raise ValueError(f"{info.file} ended while it was read: something else has cut it")
    return data.view(info.dtype).view(info.shape)


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a model's folder: model.safetensors, or the files that model.safetensors.index.json names.

    Raises ValueError naming the file: none there, a shard missing or damaged, a tensor not where the index says.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        single = folder / SINGLE_FILE
        if not single.is_file():
            raise ValueError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: give the folder of a model"
            )
        return read_header(single)
    weight_map = read_index(index)
    found: dict[str, TensorInfo] = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing, but {INDEX_FILE} names it; fetch it")
        found |= read_header(folder / name)
    for tensor, name in weight_map.items():
        if tensor not in found or found[tensor].file.name != name:
            raise ValueError(f"{folder / name} has no tensor {tensor}, although {INDEX_FILE} says so")
    return found


def read_index(path: Path) -> dict[str, str]:
    """{tensor: file name} of an index. Raises ValueError naming the file if it is damaged."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}); fetch it again") from None
    if not isinstance(weight_map, dict) or any("/" in str(name) for name in weight_map.values()):
        raise ValueError(f"{path}: weight_map must name files beside it")
    return weight_map


@dataclass(frozen=True)
class Described:
    """Shape and dtype of a tensor that will be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def plan_files(tensors: Mapping[str, Described], max_bytes: int) -> dict[str, str]:
    """{tensor: file name}: in the given order, a new file where the next tensor would exceed `max_bytes`."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, described in tensors.items():
        if shards[-1] and filled + described.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += described.num_bytes
    if len(shards) == 1:
        return dict.fromkeys(tensors, SINGLE_FILE)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    return {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}


class FolderWriter:
    """Writes a model's files; tensors come in any order, each once. `close` checks that all came.

    Args:
        folder: exists.
        tensors: what will come.
        files: {tensor: file name}.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Described], files: Mapping[str, str]) -> None:
        self._left = set(tensors)
        self._places: dict[str, TensorInfo] = {}
        for file in dict.fromkeys(files[name] for name in tensors):
            members = {name: tensors[name] for name in tensors if files[name] == file}
            self._places |= _start_file(folder / file, members)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor in its place; shape and dtype are as described."""
        place = self._places[name]
        assert tuple(tensor.shape) == place.shape and tensor.dtype == place.dtype, (
            f"{name} is not as described"
        )
        self._left.remove(name)
        data = tensor.detach().contiguous().view(-1)
        with place.file.open("r+b") as file:
            file.seek(place.begin)
            file.write(data.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Check that every tensor came."""
        assert not self._left, f"never written: {sorted(self._left)[:3]}"


def _start_file(path: Path, tensors: Mapping[str, Described]) -> dict[str, TensorInfo]:
    """Write the header, and leave room; returns where each tensor goes."""
    ordered = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in ordered:
        shape, dtype, size = tensors[name].shape, tensors[name].dtype, tensors[name].num_bytes
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(start + offset)
    places = {}
    for name in ordered:
        begin, end = header[name]["data_offsets"]
        places[name] = TensorInfo(tensors[name].shape, tensors[name].dtype, path, start + begin, start + end)
    return places


def index_json(tensors: Mapping[str, Described], files: Mapping[str, str]) -> str:
    """The text of model.safetensors.index.json."""
    metadata = {
        "total_parameters": sum(math.prod(item.shape) for item in tensors.values()),
        "total_size": sum(item.num_bytes for item in tensors.values()),
    }
    return json.dumps({"metadata": metadata, "weight_map": dict(files)}, indent=2, sort_keys=True) + "\n"


def first_few(names: Iterable[str], count: int = 3) -> str:
    """Up to `count` names, and how many more."""
    listed: Sequence[str] = sorted(names)
    more = f" and {len(listed) - count} more" if len(listed) > count else ""
    return ", ".join(listed[:count]) + more
