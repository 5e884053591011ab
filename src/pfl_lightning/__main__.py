"""``python -m pfl_lightning``: the command line, where its script isn't on the path."""

from pfl_lightning.cli.main import main

if __name__ == "__main__":
    main()
