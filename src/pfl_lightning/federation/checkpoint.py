"""What a checkpoint says of a federation: whether it is of this one, and what its clients would do next."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.data import ClientData, Split
from pfl_lightning.engines import ClientState, Job
from pfl_lightning.messages import CPU, tensors, tree_map
from pfl_lightning.seeds import derive_seed
from pfl_lightning.transfers import moved


def check_same(saved: Mapping[str, Any], method: str, sizes: Sequence[int], new_clients: float) -> None:
    """Checks that a saved federation is of the same method and the same clients.

    Args:
        saved: the checkpoint's entry ``federation``.
        method: the name of this run's method.
        sizes: training samples of this run's clients.
        new_clients: this run's setting.

    Raises:
        MisconfigurationException: if it is of another method, number of clients or partition.
    """
    if saved["method"] != method:
        raise MisconfigurationException(
            f"ckpt_path: the checkpoint is of {saved['method']} and this run of {method}; "
            "resume with the configuration that it was made with."
        )
    if len(saved["sizes"]) != len(sizes):
        raise MisconfigurationException(
            f"ckpt_path: the checkpoint has {len(saved['sizes'])} clients and data.num_clients={len(sizes)}."
        )
    if saved["sizes"] != sizes:
        raise MisconfigurationException(
            "ckpt_path: the checkpoint's clients hold other numbers of samples than those of data; "
            "resume with the data, partitioner and data.seed that it was made with."
        )
    # a state that is in no checkpoint has no settings, and those of earlier versions not this one
    then = saved["settings"].get("data.new_clients", 0) if "settings" in saved else new_clients
    if then != new_clients:
        raise MisconfigurationException(
            f"ckpt_path: the checkpoint's run had data.new_clients={then} and this one {new_clients}, of whom some may "
            "have taken part in it; take what it had."
        )


def saved_states(clients: Mapping[int, ClientState]) -> dict[int, Any]:
    """Clients' states as a checkpoint has them: on the CPU, where those of a device come in few copies.

    Args:
        clients: the states by client id.
    """
    states = {client: vars(state) for client, state in sorted(clients.items())}
    arrived = iter(moved(list(tensors(states)), CPU))
    return cast(dict[int, Any], tree_map(lambda _: next(arrived), states))


def saved_job(
    saved: Mapping[str, Any], client: int, architecture: int, data: ClientData, splits: tuple[Split, ...]
) -> Job:
    """A client's job in the round after a checkpoint.

    Args:
        saved: the checkpoint's entry ``federation``.
        client: its id.
        architecture: which architecture it has.
        data: its data.
        splits: the splits to evaluate on.
    """
    own = saved["clients"].get(client, {"personal": saved["initial"][architecture]})
    seed = derive_seed(saved["seed"], "train", saved["round"], client)
    payload = saved["payloads"][client]
    return Job(client, saved["round"], ClientState(**own), payload, data, seed, saved["lr_factor"], splits)
