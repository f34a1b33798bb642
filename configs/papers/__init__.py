"""Figures and tables of papers, a file each, for `python -m experiments.reproduce`."""
