"""Tests against real parts, the cluster they run on, and the demo."""
