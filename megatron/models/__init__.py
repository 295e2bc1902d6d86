"""Language models written against the layer protocol of ``megatron.models.backends``."""
