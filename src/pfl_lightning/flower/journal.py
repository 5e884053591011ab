"""The sums that a site's clients have helped with, on the site's disk: a second sum would tell a difference."""

import json
from pathlib import Path
from typing import Any

from pfl_lightning.flower.states import written
from pfl_lightning.flower.template import Refused

FILE = "sums.json"
"""The journal of a client, in the client's folder of states."""
MOST = 4096
"""Largest number of sums in a journal, the last ones."""


class Again(Refused):
    """Raised for a sum whose difference from an earlier one would tell of few clients.

    Args:
        reason: one sentence.
        cohort: ids of the clients of the earlier sum, apart by spaces, with whom the sum may be made again; empty if
            no cohort helps.
    """

    def __init__(self, reason: str, cohort: str = "") -> None:
        super().__init__(reason)
        self.cohort = cohort


class Journal:
    """Keeps for which model, cohort and round a client has helped to take the masks off a sum.

    A sum is known once `SecureSum.least` of its cohort have helped. Whoever has helped gives the same model no update
    for another cohort, and helps with no sum of the same model over others. So all who have helped with a sum are
    missing in every later sum of the same model over others: differences of these sums are of several clients, never of
    one, even where training repeats bit for bit. The same sum once more is of the same clients.

    A sum without any help is unknown to everybody and stands in no journal, so that a round without a sum may be
    followed by one of other clients.

    Args:
        folder: the client's folder of states, which is made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def check(self, client: int, run: str, round: int, model: str, cohort: str, summed: str = "") -> None:
        """Refuse a sum that differs from an earlier one of the same model, or of the same round.

        Args:
            client: the client's id.
            run: name of the run, the same after the run is resumed.
            round: number of the round, from 0.
            model: fingerprint of the received payload.
            cohort: ids of the clients with keys, apart by spaces.
            summed: ids of the clients with a vector in the sum, apart by spaces; empty while they aren't known.

        Raises:
            Again: if the journal has another sum of the model or the round.
            Refused: if the journal is damaged.
        """
        kept = self._read(client)
        forgotten = kept["forgotten"]
        if forgotten.get("run") == run and round <= forgotten["round"]:
            raise Again(
                f"client {client} has answered later rounds than round {round + 1} of this run, which is further back "
                "than its site remembers; go on from a later checkpoint, or begin a new run."
            )
        for entry in kept["sums"]:
            if entry["model"] == model:
                if entry["cohort"] != cohort:
                    raise Again(
                        f"client {client} has answered this model in a sum with keys of clients {entry['cohort']}, and "
                        f"gives it no update for clients {cohort}, as the difference of both sums would tell of few; "
                        "go on with the same clients, or from a later checkpoint.",
                        entry["cohort"],
                    )
                if summed and entry["summed"] != summed:
                    raise Again(
                        f"client {client} has told a sum of this model over clients {entry['summed']}, and tells none "
                        f"over clients {summed}, as the difference of both would tell of few; go on with the same "
                        "clients, or from a later checkpoint.",
                        entry["cohort"],
                    )
            elif (entry["run"], entry["round"]) == (run, round):
                raise Again(
                    f"client {client} has answered round {round + 1} of this run for another model; go on from the "
                    "run's last checkpoint, or begin a new run."
                )

    def note(self, client: int, run: str, round: int, model: str, cohort: str, summed: str) -> None:
        """Check a sum, and have it on the disk before anything of it is told.

        Args:
            client: as for `check`, and so are the others.
            run: as for `check`.
            round: as for `check`.
            model: as for `check`.
            cohort: as for `check`.
            summed: ids of the clients with a vector in the sum.

        Raises:
            Again: as for `check`.
            OSError: if the journal can't be written.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.check(client, run, round, model, cohort, summed)
        kept = self._read(client)
        entry = {"run": run, "round": round, "model": model, "cohort": cohort, "summed": summed}
        sums = [*(one for one in kept["sums"] if one != entry), entry]
        for dropped in sums[:-MOST]:
            kept["forgotten"] = {"run": dropped["run"], "round": dropped["round"]}
        kept["sums"] = sums[-MOST:]
        with written(self.path) as partial:
            partial.write_text(json.dumps(kept), encoding="utf-8")

    def _read(self, client: int) -> dict[str, Any]:
        try:
            kept: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {"forgotten": {}, "sums": []}
        # what can't be read may have been the sum that matters
        except ValueError as error:
            raise Refused(
                f"client {client}: its site's journal of sums, {FILE} in its folder of states, is damaged, and it "
                "takes part in no sum; put back a copy, or remove the file if no earlier sum matters."
            ) from error
        return kept
