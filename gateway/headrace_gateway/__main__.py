"""`python -m headrace_gateway` is the command `headrace-gateway`."""

import sys

from headrace_gateway.main import main

sys.exit(main())
