"""`python -m partwise.cli`."""

import sys

from partwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
