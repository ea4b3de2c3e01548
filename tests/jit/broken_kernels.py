"""A module that ends an importing process unless the process is prepared for it."""

raise SystemExit("no such machine")
