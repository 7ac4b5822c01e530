"""Released checkpoints: their text, speed, and loss beyond the trained length."""
