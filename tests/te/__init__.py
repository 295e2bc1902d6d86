"""Transformer Engine's own modules in tests: as they are on a GPU, over an emulated extension on CPU."""
