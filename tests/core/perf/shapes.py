"""Small models to count by hand."""

from __future__ import annotations

from headrace_core.perf.shape import Experts, Latent, ModelShape, Window

DENSE = ModelShape(
    name="dense",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=8,
    head_dim=8,
    intermediate=256,
    vocab=1000,
    gated=False,
    tied_embeddings=False,
)
GROUPED = ModelShape(
    name="grouped",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=2,
    head_dim=8,
    intermediate=256,
    vocab=1000,
    gated=True,
    tied_embeddings=True,
)
WINDOWED = ModelShape(
    name="windowed",
    layers=6,
    hidden=64,
    heads=8,
    kv_heads=2,
    head_dim=8,
    intermediate=256,
    vocab=1000,
    gated=True,
    tied_embeddings=False,
    window=Window(layers=4, tokens=100),
)
LATENT = ModelShape(
    name="latent",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=8,
    head_dim=8,
    intermediate=256,
    vocab=1000,
    gated=True,
    tied_embeddings=False,
    latent=Latent(kv_rank=32, q_rank=48, nope_dim=8, rope_dim=4, value_dim=8),
)
SPARSE = ModelShape(
    name="sparse",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=2,
    head_dim=8,
    intermediate=256,
    vocab=1000,
    gated=True,
    tied_embeddings=False,
    experts=Experts(layers=3, count=16, per_token=2, intermediate=32, shared_intermediate=64),
)
ALL = (DENSE, GROUPED, WINDOWED, LATENT, SPARSE)
