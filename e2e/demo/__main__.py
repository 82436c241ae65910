"""`make demo`: a cluster from nothing, real completions, a decode-heavy load, and the flip that it brings about."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from e2e.cluster.api import open_cluster
from e2e.cluster.progress import AlreadyRunningError, ClusterError
from e2e.demo import story
from e2e.demo.report import Report
from e2e.deployed import TimedOutError
from e2e.quickstart import ROOT
from e2e.traffic import LostError

REPORT = ROOT / "build" / "demo" / "report.json"


def main() -> int:
    """Runs the demo; its exit code is 0 if a worker was flipped and no request was lost or changed."""
    parser = argparse.ArgumentParser(prog="python -m e2e.demo", description=__doc__)
    parser.add_argument("--name", default="demo", help="name of the local cluster (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running and say how to use it")
    parser.add_argument("--report", type=Path, default=REPORT, help="where the facts are written")
    options = parser.parse_args()

    started = time.monotonic()
    options.report.parent.mkdir(parents=True, exist_ok=True)
    report = Report()
    cluster = open_cluster(options.name)
    try:
        cluster.up(keep=options.keep)
        deployed = story.Story(cluster, report).tell()
    except AlreadyRunningError as error:
        print(f"\n[demo] {error}", file=sys.stderr)
        return 1
    except (ClusterError, TimedOutError, LostError) as error:
        print(f"\n[demo] failed: {error}\n[demo] logs: {cluster.logs_dir}", file=sys.stderr)
        cluster.down()
        return 1
    except BaseException:
        cluster.down()
        raise
    report.seconds = round(time.monotonic() - started, 1)
    report.write(options.report)
    print(f"\n{report.text()}\n\n  the same facts: {os.path.relpath(options.report)}")
    if options.keep:
        print(story.how_to_use(deployed))
    else:
        cluster.down()
    return 0 if report.flips and not report.requests_lost and not report.requests_changed else 1


if __name__ == "__main__":
    sys.exit(main())
