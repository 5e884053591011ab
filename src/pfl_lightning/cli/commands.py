"""Names and one-line descriptions of the commands of ``pfl-lightning``."""

TRAINER = {
    "fit": "train a federation for some rounds, then test it",
    "validate": "evaluate every client's model on its validation split",
    "test": "evaluate every client's model on its test split",
    "join": "train new clients from a finished federation, and test them",
}
"""Commands that Lightning's command line runs: each is the Trainer's method with the same name."""

OTHERS = {
    "adapters": "write the adapters of a run's clients as folders that peft loads",
    "advise": "say which method suits which client, after a small tournament",
    "compare": "run several methods with several seeds, and write one table",
    "configs": "list the packaged configurations, or copy one to change it",
    "flower": "deploy a federation at sites that keep their data, over Flower",
    "matrix": "test each client's model of a run on every client's rows",
    "memory": "compute the memory that a configuration takes, without running it",
    "methods": "list all methods, with the bytes that each sends and keeps",
    "predict": "predict for new rows with the clients' models of a run",
    "status": "show the progress of runs, from the files in their folders",
}
"""All other commands; `cli.main` knows the module of each."""

FILLED = {"model", "datamodule", "train_dataloaders", "val_dataloaders", "dataloaders"}
"""Arguments of these methods of the Trainer that the command line fills, and that aren't options."""


def overview() -> str:
    """Return the text of ``pfl-lightning --help``."""
    about = TRAINER | OTHERS
    width = max(map(len, about))
    return "\n".join(
        [
            "usage: pfl-lightning COMMAND [options]",
            "",
            "Personalized federated learning, on Lightning.",
            "",
            *(f"  {name:<{width}}  {line}" for name, line in about.items()),
            "",
            "pfl-lightning --version prints the version.",
            "pfl-lightning COMMAND --help lists its options; fit --model.help FedProx lists the settings of a class.",
        ]
    )
