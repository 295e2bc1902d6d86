"""Training: from a command line to a trained model."""
