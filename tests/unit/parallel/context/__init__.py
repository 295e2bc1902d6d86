"""Tests of megatron/parallel/context."""
