"""Pure decisions: what was observed in, what is to be done and why out. No clock, no I/O."""
