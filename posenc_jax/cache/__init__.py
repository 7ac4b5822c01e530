"""Key/value caches for decoding."""
