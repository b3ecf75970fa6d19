"""Contract checks: claims about interfaces, shapes and paths, checked by running the thing and counting."""
