"""megatron-core 0.16 on CPU and gloo, as an independent witness of our FSDP."""
