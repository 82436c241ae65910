"""A Kubernetes for the tests and the demo: one built here from nothing, kind, or the one that kubectl points at."""
