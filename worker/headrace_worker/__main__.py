"""`python -m headrace_worker` is the command `headrace-worker`."""

import sys

from headrace_worker.main import main

sys.exit(main())
