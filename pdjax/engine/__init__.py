"""The engine: actions become programs on meshes, and what they give becomes events."""

from pdjax.engine.engine import Engine as Engine
