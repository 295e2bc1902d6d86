"""Checkpoints of others to ours and back: `python -m megatron.tools.convert_checkpoint`."""
