"""The scoreboard: claims of the literature, decided by small runs with criteria fixed before."""
