"""Mixture of experts: router, losses, grouped and shared experts, the layer."""
