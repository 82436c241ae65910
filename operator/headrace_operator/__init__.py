"""The operator: reconciles an InferenceCluster into pods and flips their roles."""
