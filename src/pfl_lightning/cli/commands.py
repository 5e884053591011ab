"""The commands of ``pfl-lightning``, by their names."""

TRAINER = {
    "fit": "runs the rounds of a federation",
    "validate": "evaluates every client on its validation split",
    "test": "evaluates every client on its test split",
    "join": "lets new clients receive what the server has, and train by it",
}
"""What the Trainer can do with a federation, and a line about each."""

OTHERS = {
    "compare": "pfl_lightning.cli.compare",
    "configs": "pfl_lightning.cli.configs",
    "flower": "pfl_lightning.flower.command",
    "methods": "pfl_lightning.cli.methods_table",
    "status": "pfl_lightning.cli.status",
}
"""All others, each by the module whose ``main`` runs it; modules are read when they are asked for."""

ABOUT = TRAINER | {
    "compare": "makes one table of many methods and seeds",
    "configs": "lists the configurations that come with the package, and copies one to be changed",
    "flower": "writes the app of a deployment at sites that keep their data",
    "methods": "lists all methods, and what they send and keep",
    "status": "tells where runs stand, by their files",
}
"""All commands, and a line about each."""


def overview() -> str:
    """What ``pfl-lightning --help`` prints."""
    width = max(map(len, ABOUT))
    return "\n".join(
        [
            "usage: pfl-lightning COMMAND [options]",
            "",
            "Personalized federated learning, on Lightning.",
            "",
            *(f"  {name:<{width}}  {line}" for name, line in ABOUT.items()),
            "",
            "pfl-lightning COMMAND --help says more of each; fit --model.help FedProx says what a class takes.",
        ]
    )
