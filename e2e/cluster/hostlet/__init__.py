"""The hostlet: offers nodes to a Kubernetes API server and runs their pods as processes of this machine."""
