"""Builds the Kubernetes objects that an InferenceCluster is made of, as plain dictionaries."""
