"""Training of all seeds side by side."""
