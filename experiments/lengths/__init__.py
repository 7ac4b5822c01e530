"""A study of how far a released model reads, by methods that need no training."""
