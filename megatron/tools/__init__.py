"""Commands beside training: python -m megatron.tools.NAME. They import anything; nothing imports them."""
