"""How long a worker takes and how much it holds: step times, KV transfers and memory of a model on an accelerator."""
