"""The language model of the experiments, and its schemes by name."""
