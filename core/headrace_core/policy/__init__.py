"""The rules: pure functions from a read-only view to a decision with an enum reason."""
