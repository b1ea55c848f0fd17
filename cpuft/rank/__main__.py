"""`python -m cpuft.rank COMMAND ...`."""

from cpuft.rank.process import main

main()
