"""`python -m cpuft` is the same as `cpuft`."""

from cpuft.cli import main

if __name__ == "__main__":
    main()
