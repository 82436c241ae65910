"""Starts the operator: `python -m headrace_operator`."""

from headrace_operator.main import main

if __name__ == "__main__":
    main()
