"""End-to-end tests of the operator alone: a real API server, and workers that speak the role protocol only."""
