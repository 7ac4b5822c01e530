"""Position encodings, one file each, by what they act on."""
