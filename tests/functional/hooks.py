"""What can be hooked into a run before it begins: context managers named in FUNCTIONAL_TEST_HOOKS (hooked.py).

The variable holds module:function, separated by commas. Only tests set it; nothing of megatron/ knows of it.
"""

from __future__ import annotations

import contextlib
import importlib
from argparse import Namespace
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def entered(names: str) -> Iterator[None]:
    """Within it, all hooks of a comma-separated list hold."""
    with contextlib.ExitStack() as stack:
        for name in filter(None, names.split(",")):
            module, _, function = name.partition(":")
            stack.enter_context(getattr(importlib.import_module(module), function)())
        yield


@contextlib.contextmanager
def transformer_engine_on_cpu() -> Iterator[None]:
    """--transformer-impl transformer_engine means TE's own Python code over the emulated extension."""
    from tests.te.engine import load

    load()
    from megatron.train.arguments import resolve

    def device(v: Namespace, context: resolve.Context) -> None:
        wanted = v.transformer_impl
        original(v, context)
        if wanted == "transformer_engine":
            v.transformer_impl = wanted
            context.warnings[:] = [line for line in context.warnings if "--transformer-impl" not in line]

    original = resolve._device
    steps = tuple(device if step is original else step for step in resolve._STEPS)
    with mock.patch.object(resolve, "_STEPS", steps):
        yield


@contextlib.contextmanager
def deep_ep_over_gloo() -> Iterator[None]:
    """The package deep_ep is there: the flex dispatcher's libraries over plain all-to-alls."""
    from tests.unit.parallel.expert import fake_flex

    with fake_flex.deep_ep_over_gloo():
        yield
