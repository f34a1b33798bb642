"""What is decided: plain Python over ids and counts. No jax, no clock, no randomness."""
