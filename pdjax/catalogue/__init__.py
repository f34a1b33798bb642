"""Chips, links and models by name, in numbers, each with its source."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from pdjax.catalogue.chips import CHIPS, Chip
from pdjax.catalogue.links import LINKS, PublishedLink
from pdjax.catalogue.models import MODELS
from pdjax.catalogue.shapes import Experts, Heads, Latent, Mlp, Shape, shape_of
from pdjax.core.link import Link

__all__ = [
    "CHIPS",
    "LINKS",
    "MODELS",
    "CatalogueError",
    "Chip",
    "Experts",
    "Heads",
    "Latent",
    "Mlp",
    "PublishedLink",
    "Shape",
    "chip",
    "link",
    "model",
    "shape_of",
]

_T = TypeVar("_T")


class CatalogueError(ValueError):
    """A chip, link or model that is not here; the message names those that are."""


def chip(name: str) -> Chip:
    """Raises CatalogueError for a name that is not in CHIPS."""
    return _find("chip", name, CHIPS)


def link(name: str) -> Link:
    """Raises CatalogueError for a name that is not in LINKS."""
    return _find("link", name, LINKS).link


def model(name: str) -> Shape:
    """Raises CatalogueError for a name that is not in MODELS."""
    return _find("model", name, MODELS)


def _find(what: str, name: str, table: Mapping[str, _T]) -> _T:
    if name not in table:
        near = get_close_matches(name, table, n=1)
        hint = f"did you mean `{near[0]}`? " if near else ""
        raise CatalogueError(f"no {what} `{name}`; {hint}there are {', '.join(table)}")
    return table[name]
