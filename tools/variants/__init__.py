"""Every variant of every kernel that the lab launches, compiled for Hopper, as a table: `python -m tools.variants`."""
