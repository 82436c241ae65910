"""What Headrace plugs into vLLM's KV transfer."""
