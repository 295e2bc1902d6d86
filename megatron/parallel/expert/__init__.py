"""Experts on several ranks: which rows go where, and the dispatchers that bring them there and back."""

from megatron.parallel.expert.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    Dispatched,
    Dispatcher,
    ExpertGrid,
)
from megatron.parallel.expert.permute import Routing

__all__ = ["AllGatherDispatcher", "AllToAllDispatcher", "Dispatched", "Dispatcher", "ExpertGrid", "Routing"]
