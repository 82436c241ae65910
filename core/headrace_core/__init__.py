"""What Headrace decides: API, policies, step times, simulator, planner. Its only I/O is to read files it is given."""
