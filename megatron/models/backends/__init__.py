"""Layer backends: the protocol (base), plain torch, Transformer Engine."""
