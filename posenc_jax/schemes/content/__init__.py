"""Schemes whose terms in attention depend on content as well as positions."""
