"""Entry points: parse flags, call one function."""
