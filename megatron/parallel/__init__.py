"""Tensor, sequence, context, expert and pipeline parallelism. Imports torch only; knows no models."""
