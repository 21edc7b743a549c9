"""`python -m batchwright` is the command line."""

from batchwright.cli.main import main

if __name__ == "__main__":
    main()
