"""The steps of one request: admit, route, prefill, decode, and recover when one of them fails."""
