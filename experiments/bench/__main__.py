"""`python -m experiments.bench`: as `python -m experiments bench`."""

import sys

from experiments.__main__ import main

sys.exit(main(["bench", *sys.argv[1:]]))
