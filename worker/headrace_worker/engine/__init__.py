"""The engine as the worker sees it, and vLLM behind it."""
