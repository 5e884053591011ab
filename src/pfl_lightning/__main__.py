"""Run the command line as ``python -m pfl_lightning``, for systems without the script on the path."""

from pfl_lightning.cli.main import main

if __name__ == "__main__":
    main()
