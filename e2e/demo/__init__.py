"""`make demo`: what a user sees first."""
