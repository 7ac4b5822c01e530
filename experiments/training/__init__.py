"""Training on one device or a mesh."""
