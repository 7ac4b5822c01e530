"""Array functions that several schemes share."""
