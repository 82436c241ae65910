"""The planner: how many workers, of which shape, for a traffic and its SLOs."""
