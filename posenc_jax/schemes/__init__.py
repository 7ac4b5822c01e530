"""Position encodings, one file per scheme, in folders by the part of a layer they act on."""
