"""The worker: vLLM with Headrace's scheduler and KV connector, and a role that can change while it runs."""
