"""Clients' adapters merged into whole models, and public benchmarks on these by lm-evaluation-harness."""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from pfl_lightning.nets.causal_lm import local_folder, package

RESULTS = "benchmarks.json"
"""Name of the file with a model's scores."""


def merge_adapters(folder: Path | str, into: Path | str) -> None:
    """Write the whole model of a folder of adapters, which programs without ``peft`` load.

    The base is the one that the folder names, and its tokenizer goes along, if it has one. Merged layers round
    otherwise than adapters beside them: logits differ by some 1e-4.

    Args:
        folder: a client's folder of adapters, as of `export_adapters`.
        into: folder of the whole model, made if missing.

    Raises:
        MisconfigurationException: if the folder has no adapters, or its base is gone.
    """
    peft, transformers = package("peft"), package("transformers")
    try:
        named = peft.PeftConfig.from_pretrained(str(folder), local_files_only=True).base_model_name_or_path
    except ValueError as error:
        raise MisconfigurationException(
            f"folder={str(folder)!r} has no adapter_config.json; give a folder of `pfl-lightning adapters`."
        ) from error
    base = local_folder(str(named), "adapter_config.json: base_model_name_or_path")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload().save_pretrained(str(into))
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    # a model of numbers alone has none, which is said by several types
    except (OSError, ValueError, KeyError):
        return
    tokenizer.save_pretrained(str(into))


def run_tasks(
    model: Path | str,
    tasks: Sequence[str],
    limit: int | None = None,
    include: Path | str | None = None,
    batch_size: int = 8,
    device: str | None = None,
) -> dict[str, dict[str, float]]:
    """Return the scores of a whole model on tasks of lm-evaluation-harness, by task and metric.

    The harness reads its tasks' data from the hub, or from files that a task of one's own names.

    Args:
        model: folder of the model and its tokenizer, as of `merge_adapters`.
        tasks: names of tasks, such as ``hellaswag``.
        limit: rows of each task, from the first; None takes all.
        include: folder with configurations of further tasks.
        batch_size: texts in a batch.
        device: the harness's device, such as ``cpu``; None lets it choose.

    Raises:
        MisconfigurationException: if the harness is missing, or knows no such task.
    """
    try:
        harness, found = import_module("lm_eval"), import_module("lm_eval.tasks")
        # on its own, since the package imports without it
        import_module("lm_eval.models.huggingface")
    except ImportError as error:
        raise MisconfigurationException(
            f"tasks={list(tasks)} are run by lm-evaluation-harness, which isn't installed ({error}); pip install "
            "'lm_eval[hf]'."
        ) from error
    manager = found.TaskManager(include_path=None if include is None else str(include))
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise MisconfigurationException(
            f"tasks={list(tasks)}: lm-evaluation-harness has no task {unknown[0]}; `lm_eval ls tasks` lists them, and "
            "include names a folder with your own."
        )
    outcome: dict[str, Any] = harness.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model)},
        tasks=list(tasks),
        limit=limit,
        task_manager=manager,
        batch_size=batch_size,
        device=device,
        bootstrap_iters=0,
    )
    return {
        task: {name.removesuffix(",none"): value for name, value in scores.items() if type(value) in (int, float)}
        for task, scores in outcome["results"].items()
    }


def benchmark(folder: Path, tasks: Sequence[str], **settings: Any) -> dict[str, dict[str, float]]:
    """Write the whole model of a folder of adapters into it, as ``merged``, and its scores, as ``benchmarks.json``.

    Args:
        folder: the folder of adapters.
        tasks: names of tasks.
        **settings: further arguments of `run_tasks`.

    Returns:
        The scores.
    """
    merge_adapters(folder, folder / "merged")
    scores = run_tasks(folder / "merged", tasks, **settings)
    (folder / RESULTS).write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    return scores
