"""Settings: tables of TOML and flags as frozen dataclasses."""
