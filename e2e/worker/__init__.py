"""Tests of real workers: vLLM, the real connector and scheduler, over loopback, without a cluster."""
