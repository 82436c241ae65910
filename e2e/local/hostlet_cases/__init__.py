"""Cases of the hostlet's conformance: each holds what the hostlet does against one page of the Kubernetes docs."""
