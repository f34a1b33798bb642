"""One experiment each: `get_config()` says what is served, where, and with which requests."""
