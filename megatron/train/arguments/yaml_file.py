"""--yaml-cfg: the same flags from a YAML file.

The file is a mapping of flags (by name, with or without dashes, or by destination) to values, flat or under
section headings, which mean nothing, as in Megatron-LM's example (`model_parallel:`, `language_model:`).
Null means not given. Fields of megatron-core's configurations that are no flags are in yaml_keys.py.
Values go through the flags' own types, so that a file and a command line cannot differ in meaning.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.train.arguments.flag import Flag, Switch
from megatron.train.arguments.yaml_keys import CONFIG_KEYS

# Names of Megatron-LM's YAML files that are not destinations of flags.
_OTHER_NAMES = {
    "num_moe_experts": "num_experts",
    "fp8_param": "fp8_param_gather",
    "tokenizer_metadata": "metadata_path",
}


def words_from_yaml(path: str, by_dest: Mapping[str, tuple[Flag, ...]]) -> list[str]:
    """The file as command-line words.

    Raises ValueError naming the file and the key: not readable, no mapping, unknown name, wrong kind of
    value.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--yaml-cfg {path}: {error.strerror or error}; give the path of a YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise ValueError(f"--yaml-cfg {path}: not valid YAML ({line})") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ValueError(f"--yaml-cfg {path}: the file must be a mapping of flags to values")
    words: list[str] = []
    for key, value in _entries(content):
        try:
            words += _words(key, value, by_dest)
        except ValueError as error:
            raise ValueError(f"--yaml-cfg {path}: {error}") from error
    return words


def _entries(content: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _entries(value)
        else:
            yield str(key), value


def _words(key: str, value: object, by_dest: Mapping[str, tuple[Flag, ...]]) -> list[str]:
    field = CONFIG_KEYS.get(key.lstrip("-").replace("-", "_"))
    if field is not None:
        return field.words(key, value)
    candidates, by_name = _flags_for(key, by_dest)
    if by_name and isinstance(candidates[0].type, Switch):
        # The name of a switch: true means that it is given ("no_mmap_bin_files: true").
        if not isinstance(value, bool):
            raise ValueError(f"{key}: {candidates[0].name} takes true or false, not {value!r}")
        return [candidates[0].name] if value else []
    if value is None or value == candidates[0].default:
        return []  # null: not given
    for flag in candidates:
        if isinstance(flag.type, Switch):
            if not isinstance(value, bool):
                raise ValueError(f"{key}: {flag.name} takes true or false, not {value!r}")
            if flag.type is Switch.TOGGLE:
                return [flag.name if value else f"--no-{flag.name.removeprefix('--')}"]
            if value is flag.given_value:
                return [flag.name]
    flag = candidates[0]
    if isinstance(flag.type, Switch):
        return []  # a switch that has no spelling for this value is at its default
    if isinstance(value, list) and flag.nargs is not None:
        return [flag.name, *(_word(item) for item in value)]
    return [f"{flag.name}={_word(value)}"] if flag.nargs is None else [flag.name, _word(value)]


def _word(value: object) -> str:
    return str(value)


def _flags_for(key: str, by_dest: Mapping[str, tuple[Flag, ...]]) -> tuple[tuple[Flag, ...], bool]:
    """The flags that a key means, and whether it is a flag's name that is not its destination."""
    dest = key.lstrip("-").replace("-", "_")
    dest = _OTHER_NAMES.get(dest, dest)
    if dest in by_dest:
        return by_dest[dest], False
    for group in by_dest.values():
        for flag in group:
            if any(spelling.lstrip("-").replace("-", "_") == dest for spelling in flag.spellings):
                return (flag,), True
    near = difflib.get_close_matches(dest, by_dest, n=1)
    raise ValueError(f"unknown key {key!r}" + (f": did you mean {near[0]!r}?" if near else ""))
