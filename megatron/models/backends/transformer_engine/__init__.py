"""Layers from Transformer Engine: the only package that imports transformer_engine, and only when a backend
is made.
"""

from megatron.models.backends.transformer_engine.backend import TransformerEngineBackend
from megatron.models.backends.transformer_engine.capabilities import Capabilities, probe
from megatron.models.backends.transformer_engine.settings import (
    EngineSettings,
    Fp8Settings,
    attention_environment,
    describe_attention,
)

__all__ = [
    "Capabilities",
    "EngineSettings",
    "Fp8Settings",
    "TransformerEngineBackend",
    "attention_environment",
    "describe_attention",
    "probe",
]
