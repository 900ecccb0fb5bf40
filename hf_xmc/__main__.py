"""`python -m hf_xmc`, the command `hf-xmc`: launchers of several processes take modules."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
