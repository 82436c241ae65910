"""Names the lengths that can be drawn without a file: log-normal fits (`lengths.fit`) of public traces.

The means lie within 10 % of the traces' (sharegpt 2340 + 439, azure-conversation 1155 + 211, azure-code 2048 + 28,
arxiv-summarization 2588 + 291 tokens), but for the outputs of the last two (17 % short); the tails are a log-normal's,
not theirs. A trace of one's own is better.
"""

from __future__ import annotations

import difflib
from typing import Final

from headrace_core.sim.lengths import LogNormal
from headrace_core.sim.workload import WorkloadError

LENGTH_FITS: Final = {
    "sharegpt": LogNormal(
        prompt_mean=7.0065,
        prompt_deviation=1.6257,
        output_mean=5.7694,
        output_deviation=1.0011,
        correlation=0.0624,
        most_prompt_tokens=8141,
        most_output_tokens=1024,
        source="log-normal fit of ShareGPT conversations up to 8k tokens (microsoft/vidur, MIT)",
    ),
    "arxiv-summarization": LogNormal(
        prompt_mean=7.7166,
        prompt_deviation=0.7548,
        output_mean=5.1867,
        output_deviation=0.7956,
        correlation=-0.4841,
        most_prompt_tokens=4054,
        most_output_tokens=4056,
        source="log-normal fit of arXiv summaries up to 4k tokens (microsoft/vidur, MIT)",
    ),
    "azure-conversation": LogNormal(
        prompt_mean=6.6333,
        prompt_deviation=0.9852,
        output_mean=5.019,
        output_deviation=0.859,
        correlation=0.0874,
        most_prompt_tokens=14050,
        most_output_tokens=1000,
        source="log-normal fit of Azure's conversation trace of 2023 (Azure/AzurePublicDataset, CC BY)",
    ),
    "azure-code": LogNormal(
        prompt_mean=6.9986,
        prompt_deviation=1.3602,
        output_mean=2.7882,
        output_deviation=0.8472,
        correlation=-0.0045,
        most_prompt_tokens=7437,
        most_output_tokens=1899,
        source="log-normal fit of Azure's code trace of 2023 (Azure/AzurePublicDataset, CC BY)",
    ),
}


def length_fit(name: str) -> LogNormal:
    """The fit of that name.

    Raises:
        WorkloadError: there is none; the message names the nearest.
    """
    found = LENGTH_FITS.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), LENGTH_FITS, n=2, cutoff=0.4) or list(LENGTH_FITS)
        raise WorkloadError(
            f"lengths: {name!r} is neither a file nor the name of a fit; give PROMPT,OUTPUT, a file, or "
            f"{' or '.join(near)}"
        )
    return found
