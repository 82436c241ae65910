"""What Headrace plugs into vLLM's scheduler."""
