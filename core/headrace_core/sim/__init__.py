"""The simulator: discrete events over the same policies that ship, with step times from `perf`.

How it counts:

1. Open loop: requests arrive when the workload says, whatever became of those before. Unfinished and rejected ones are
   misses.
2. TTFT runs from arrival to the end of the prefill, where the first token is sent. The wait for the second token, for
   admission and transfer, is reported apart, and is in TPOT = (last - first) / (n - 1) and in the largest gap.
3. Requests join and are admitted at step boundaries. Between two changes of a batch its steps are not taken one by one:
   `batch` has them in closed form, equal to stepping to 1e-6 ms. What reports read in between is advanced first.
4. Gateway, dispatchers and elasticity policies see reports, `report_interval_ms` old at most, plus what they did
   themselves since; and predicted lengths, never true ones.
5. A worker has one link to send and one to receive, and transfers on them follow one another. KV is held on both ends
   until it was fetched. Transfers do not overlap with the prefill.
6. A prefill worker's prefix cache is its own, finite, forgets the least recently used block, and is cold after a flip.
   Hits are looked up when a prompt is queued. Deflected and recomputed prompt tokens slow the steps that they ride on.
7. The warm-up is cut, the tail is not; see `report` for intervals, for what is marked, and for what counts as unstable.
8. Mooncake's time stamps fall in bins of 3 s: `traces` spreads them inside their bin, and says so.

With several pipeline stages a decode worker has one batch a stage, each in another stage at any time; they share its KV
cache and do not wait for one another.
"""
