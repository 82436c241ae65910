"""The simulator: discrete events over the same policies that ship, with step times from `perf`."""
