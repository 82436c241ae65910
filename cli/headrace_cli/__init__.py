"""The command `headrace`, also `kubectl headrace`."""
