"""RoPE frequency maps: context extension and frequency selection, one per file."""
