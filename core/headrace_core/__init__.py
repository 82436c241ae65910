"""What Headrace decides: its API, its wire format and its policies, with no I/O of any kind."""
