"""The gateway: the global scheduler, which takes OpenAI requests and streams the answers back."""
