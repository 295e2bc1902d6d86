"""Give parameters of TE's modules what every parameter of ours carries: where it lies, how it starts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from megatron.models.init import InitSpec
from megatron.parallel.annotate import ParameterAnnotation, annotate

Descriptions = Mapping[str, tuple[InitSpec, ParameterAnnotation]]
"""Parameter name -> how it starts, where it lies."""


def describe(module: nn.Module, descriptions: Descriptions) -> nn.Module:
    """Attach (init_spec, parallel_annotation) by parameter name; every parameter must be named. Returns
    `module`.
    """
    for name, parameter in module.named_parameters():
        assert name in descriptions, f"{type(module).__name__}.{name} is not described"
        spec, annotation = descriptions[name]
        parameter.init_spec = spec  # type: ignore[attr-defined]
        annotate(parameter, annotation)
    return leave_extra_state_out(module)


def leave_extra_state_out(module: nn.Module) -> nn.Module:
    """Keep TE's `_extra_state` out of checkpoints, and do without it when loading one.

    So that a checkpoint of the torch backend loads, strictly, into this one and the other way round, in any layout.
    It is empty but for the delayed FP8 recipe, where it is a pickle of one rank's recent maxima: a run that resumes
    finds them anew.
    """
    for child in module.modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            child.register_state_dict_post_hook(_drop_extra_state)
            child.register_load_state_dict_post_hook(_forgive_missing_extra_state)
    return module


def _drop_extra_state(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
    state.pop(f"{prefix}_extra_state", None)


def _forgive_missing_extra_state(module: nn.Module, incompatible: object) -> None:
    missing: list[str] = incompatible.missing_keys  # type: ignore[attr-defined]
    missing[:] = [key for key in missing if not _is_extra_state(key)]


def _is_extra_state(key: str) -> bool:
    return key.rsplit(".", 1)[-1] == "_extra_state"
