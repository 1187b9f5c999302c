"""`python -m aleator.cli` is the `aleator` program."""

from aleator.cli import main

if __name__ == "__main__":
    main()
