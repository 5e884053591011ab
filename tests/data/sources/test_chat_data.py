"""Conversations, of files that are written here, with a tokenizer of twenty words."""

import csv
import itertools
import json
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from chats import BARE, MARKED, ROWS, WORDS, fitted, made_tokenizer, numbers, turns
from command import pfl, refusal
from pfl_lightning.client import ClientModule
from pfl_lightning.client.generation import answers
from pfl_lightning.data import IID, ChatData

transformers = pytest.importorskip("transformers", reason="needs the extra lm")

PADDING, END = 2, 1
# as templates that leave out the thoughts of earlier answers
FORGETFUL = BARE.replace("{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' else 'yes' }}")


@pytest.fixture(scope="module")
def tokenizer():
    return made_tokenizer()


WHOLE = "user : hi there </s> assistant : you are good </s> user : no </s> assistant : yes yes </s>"
ANSWERS = [7, 8, 9, 10, 17, 18, 19]
"""Positions of the counted tokens in `WHOLE`."""


def loaded(rows, tokenizer, **settings):
    data = ChatData(rows, tokenizer, **settings)
    return data, data.load()


@pytest.mark.parametrize("template", [BARE, MARKED])
def test_targets_are_the_answers_one_position_on(tokenizer, template):
    data, pool = loaded(ROWS, tokenizer, chat_template=template)
    tokens = numbers(WHOLE)
    assert pool.x[0].tolist() == tokens[:-1]
    assert pool.y[0].tolist() == [token if i in ANSWERS else -100 for i, token in enumerate(tokens)][1:]
    short = numbers("user : you </s> assistant : bad")
    assert pool.x[1].tolist() == short + [PADDING] * (19 - len(short))
    assert pool.y[1].tolist() == [-100] * 5 + numbers("bad </s>") + [-100] * 12
    assert list(pool.client) == ["Bonn", "Ulm", "Bonn"]
    assert data.input_shape == (1024,) and data.task.vocabulary == len(WORDS)
    assert data.head_lines == [("texts", "3 conversations, 11 of 34 tokens count")]


def test_words_before_an_answer_do_not_count_where_a_template_has_no_prompt_for_it(tokenizer):
    silent = BARE[: BARE.index("{% if add_generation_prompt")]
    _, pool = loaded(ROWS[:1], tokenizer, chat_template=silent)
    tokens = numbers(WHOLE)
    assert pool.y[0].tolist() == [token if i in ANSWERS else -100 for i, token in enumerate(tokens)][1:]


def byte_tokenizer(*marks):
    """A token a byte, and some marks; its end is ``</s>``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>")
    made.add_special_tokens({"additional_special_tokens": list(marks)})
    return made


SAID = {
    "plain": ("### User:\nhi\n\n### Assistant:\n", "yes</s>", "\n### User:\nno\n\n### Assistant:\n", "bad</s>"),
    "alpaca": (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nhi\n\n### Response:\n",
        *("yes</s>", "\n\n### Instruction:\nno\n\n### Response:\n", "bad</s>"),
    ),
    "vicuna": (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: hi ASSISTANT:",
        *(" yes</s>", "USER: no ASSISTANT:", " bad</s>"),
    ),
    "chatml": (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        *("yes<|im_end|>", "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n", "bad<|im_end|>"),
    ),
}
"""What templates write: other text and answers in turn."""


@pytest.mark.parametrize("name", SAID)
def test_templates_by_name_write_texts_and_mark_answers(name):
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    data, pool = loaded([{"messages": turns("hi", "yes", "no", "bad"), "client": 0}], tokenizer, chat_template=name)
    tokens, counts = [], []
    for part, text in enumerate(SAID[name]):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens, counts = tokens + ids, counts + [part % 2 == 1] * len(ids)
    # white space behind the last answer is no target
    size = len(tokens) - 1
    assert pool.x[0].tolist()[:size] == tokens[:-1]
    expected = [token if is_counted else -100 for token, is_counted in zip(tokens, counts, strict=True)][1:]
    assert pool.y[0].tolist() == expected + [-100] * (pool.y.shape[1] - size)
    assert tokenizer.decode(data.encode("hi")) == SAID[name][0]


def test_chatml_needs_its_marks():
    with pytest.raises(MisconfigurationException, match=r"chatml needs .*im_end.*alpaca"):
        ChatData(ROWS, byte_tokenizer(), chat_template="chatml")


def test_all_tokens_can_count(tokenizer):
    data, pool = loaded(ROWS[:1], tokenizer, loss_on="all")
    assert pool.y[0].tolist() == numbers(WHOLE)[1:]
    assert "exact_match" not in data.task.configure_metrics()


def test_white_space_behind_the_end_of_an_answer_is_no_part_of_it():
    characters = made_tokenizer("{% for m in messages %}{{ m['content'] }}</s>\n{% endfor %}")
    data = ChatData(ROWS, characters)
    text, spans = data._answers(turns("hi", "yes", "no", "bad"), "row 0")
    assert [text[slice(*span)] for span in spans] == ["yes</s>", "bad</s>"]


def test_a_template_that_rewrites_earlier_answers_is_refused(tokenizer):
    with pytest.raises(MisconfigurationException, match=r"row 0: .*\{% generation %\}"):
        loaded(ROWS, tokenizer, chat_template=FORGETFUL)
    # a single answer isn't rewritten
    assert (loaded(ROWS[1:], tokenizer, chat_template=FORGETFUL)[1].y != -100).sum() == 4


def test_an_answer_before_any_question_counts_from_its_text_on(tokenizer):
    rows = [{"messages": [{"from": "gpt", "value": "good"}, {"from": "human", "value": "yes"}], "client": "Ulm"}]
    _, pool = loaded(rows, tokenizer)
    assert pool.y[0].tolist() == [-100, *numbers("good </s>"), *[-100] * 4]


def test_texts_are_cut_and_those_without_answer_left_out_and_counted(tokenizer):
    data, pool = loaded(ROWS, tokenizer, max_length=7)
    # 'user : hi there </s> assistant : you' has the first token of an answer as the last target
    assert pool.y.tolist() == [
        [-100] * 6 + numbers("you"),
        [-100] * 5 + numbers("bad </s>"),
        [-100] * 6 + numbers("no"),
    ]
    data, pool = loaded(ROWS, tokenizer, max_length=6)
    assert pool.x.tolist() == [numbers("user : you </s> assistant :")] and list(pool.client) == ["Ulm"]
    assert data.head_lines[0][1].endswith(
        "3 cut to 6 tokens; 2 without an answer there left out; clients without any left out: Bonn"
    )
    with pytest.raises(MisconfigurationException, match=r"data\.max_length=3: .* 3 rows"):
        loaded(ROWS, tokenizer, max_length=3)


def test_packed_texts_are_those_of_one_client_and_split(tokenizer):
    rows = [row | {"fold": fold} for row in ROWS for fold in ("train", "train", "test")]
    plain = loaded(rows, tokenizer, split_column="fold")[1]
    _, pool = loaded(rows, tokenizer, split_column="fold", packing=True, max_length=30)
    x, positions = pool.x["input_ids"], pool.x["position_ids"]
    owners = {}
    for row, owner in enumerate(zip(pool.client, pool.split, strict=True)):
        begins = [*(positions[row] == 0).nonzero().flatten().tolist(), x.shape[1]]
        for begin, end in itertools.pairwise(begins):
            assert positions[row, begin:end].tolist() == list(range(end - begin))
            if x[row, begin] != PADDING:
                owners.setdefault(owner, []).append((x[row, begin:end].tolist(), pool.y[row, begin:end].tolist()))
    expected = {}
    for row, owner in enumerate(zip(plain.client, plain.split, strict=True)):
        size = int((plain.x[row] != PADDING).sum())
        expected.setdefault(owner, []).append((plain.x[row, :size].tolist(), plain.y[row, :size].tolist()))
    assert {k: sorted(v) for k, v in owners.items()} == {k: sorted(v) for k, v in expected.items()}
    # 19 and 8 positions go into 30, so that each group of Bonn's has as many samples as long texts
    assert sorted(zip(pool.client, pool.split, strict=True)) == [
        *[("Bonn", "test"), ("Bonn", "train"), ("Bonn", "train"), ("Ulm", "test"), ("Ulm", "train")]
    ]


def test_files_of_all_layouts_hold_the_same_conversations(tokenizer, tmp_path):
    pairs = {"Bonn": [("hi there", "yes"), ("you", "no")], "Ulm": [("are you", "good")]}
    flat = [(client, *pair) for client, held in pairs.items() for pair in held]
    named = [{"client": c, "instruction": q, "response": a} for c, q, a in flat]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, named)) + "\n")
    bench = {
        c: [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in held]
        for c, held in pairs.items()
    }
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    single = {c: [{"instruction": q, "response": a} for q, a in held] for c, held in pairs.items()}
    (tmp_path / "single.json").write_text(json.dumps(single))
    (tmp_path / "dpa").mkdir()
    for number, held in enumerate(pairs.values()):
        content = [{"instruction": q, "output": a, "task": "x", "category": "y"} for q, a in held]
        (tmp_path / "dpa" / f"local_training_{number}.json").write_text(json.dumps(content))
    expected = loaded(named, tokenizer)[1]
    for source in ("rows.jsonl", "bench.json", "single.json", "dpa"):
        _, pool = loaded(str(tmp_path / source), tokenizer)
        assert torch.equal(pool.x, expected.x) and torch.equal(pool.y, expected.y)
        assert list(pool.client) == ([0, 0, 1] if source == "dpa" else ["Bonn", "Bonn", "Ulm"])
        assert pool.split is None
    test = [{"instruction": "hi", "output": "bad", "input": "there"}]
    (tmp_path / "dpa" / "local_testing_1.jsonl").write_text(json.dumps(test[0]))
    _, pool = loaded(tmp_path / "dpa", tokenizer)
    assert list(pool.split) == ["train", "train", "train", "test"] and list(pool.client) == [0, 0, 1, 1]
    assert pool.y[3].tolist() == [-100] * 6 + numbers("bad </s>")


def folder_of(path, files):
    path.mkdir()
    for name, rows in files.items():
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_folder_has_a_file_for_each_client(tokenizer, tmp_path):
    files = {"Bonn.jsonl": ROWS[::2], "St. Ulm.jsonl": ROWS[1:2], ".hidden.jsonl": ROWS, "notes.txt": []}
    _, pool = loaded(str(folder_of(tmp_path / "named", files)), tokenizer)
    assert list(pool.client) == ["Bonn", "Bonn", "St. Ulm"] and pool.split is None
    expected = loaded([ROWS[0], ROWS[2], ROWS[1]], tokenizer)[1]
    assert torch.equal(pool.x, expected.x) and torch.equal(pool.y, expected.y)
    numbered = folder_of(tmp_path / "numbered", {f"{k}.jsonl": ROWS[:1] for k in (10, 2)})
    assert sorted(loaded(numbered, tokenizer)[1].client) == [2, 10]
    # two clients, which are one as numbers
    same = folder_of(tmp_path / "same", {f"{k}.jsonl": ROWS[:1] for k in ("1", "01")})
    assert sorted(loaded(same, tokenizer)[1].client) == ["01", "1"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"train.jsonl": ROWS, "test.jsonl": ROWS}, ["test.jsonl", "split_column"]),
        ({"Bonn.jsonl": ROWS, "Ulm.jsonl": []}, ["Ulm.jsonl", "no rows"]),
        ({"notes.txt": []}, ["CLIENT.jsonl", "local_training_CLIENT.json"]),
    ],
)
def test_a_folder_of_other_files_is_refused(tokenizer, tmp_path, files, words):
    with pytest.raises(MisconfigurationException) as refused:
        loaded(folder_of(tmp_path / "some", files), tokenizer)
    assert all(word in str(refused.value) for word in [*words, "some"])


@pytest.mark.parametrize("kind", ["parquet", "folder", "dataset"])
def test_tables_of_conversations(tokenizer, tmp_path, kind):
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    table = datasets.Dataset.from_list(ROWS)
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        table.to_parquet(path)
    elif kind == "folder":
        table.save_to_disk(path)
    _, pool = loaded(table if kind == "dataset" else str(path), tokenizer)
    expected = loaded(ROWS, tokenizer)[1]
    assert torch.equal(pool.x, expected.x) and torch.equal(pool.y, expected.y)
    assert list(pool.client) == list(expected.client)


def test_clients_keep_their_names_and_other_partitioners_divide(tokenizer):
    data = ChatData(ROWS * 4, tokenizer)
    data.setup()
    assert data.client_names == ["Bonn", "Ulm"]
    assert [sum(data.size(k, split) for split in ("train", "val", "test")) for k in (0, 1)] == [8, 4]
    strangers = [{"messages": row["messages"]} for row in ROWS * 4]
    data = ChatData(strangers, tokenizer, num_clients=3, partitioner=IID())
    data.setup()
    assert data.num_clients == 3


def test_a_tokenizer_is_read_from_a_folder(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "words")
    data, pool = loaded(ROWS, str(tmp_path / "words"))
    assert torch.equal(pool.y, loaded(ROWS, tokenizer)[1].y)
    assert data.agreed == ChatData(ROWS, tokenizer).agreed
    assert data.agreed != ChatData(ROWS, tokenizer, chat_template="plain").agreed


def test_a_tokenizer_with_code_of_its_own_is_refused(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asked whether to run the code"))
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(MisconfigurationException, match=r"data\.tokenizer=.*auto_map in tokenizer_config\.json"):
        ChatData(ROWS, str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_prompts_and_texts(tokenizer):
    data = ChatData(ROWS, tokenizer)
    assert data.encode("hi") == numbers("user : hi </s> assistant :")
    assert data.encode(turns("hi", "yes", "no")) == numbers(
        "user : hi </s> assistant : yes </s> user : no </s> assistant :"
    )
    assert data.decode(numbers("yes yes </s>")) == "yes yes"
    assert data.end_tokens == {0, 1, 2}


def test_a_tokenizer_adds_no_mark_to_those_of_the_template():
    from tokenizers.processors import TemplateProcessing

    template = "<s> " + BARE
    marking = made_tokenizer(template)
    adding = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", WORDS.index("<s>"))])
    marking.backend_tokenizer.post_processor = adding
    assert marking("hi")["input_ids"] == numbers("<s> hi")
    data = ChatData(ROWS, marking)
    assert data.encode("hi") == numbers("<s> user : hi </s> assistant :")
    for loss_on in ("assistant", "all"):
        _, pool = loaded(ROWS[1:2], marking, loss_on=loss_on)
        assert pool.x[0].tolist() == numbers("<s> user : you </s> assistant : bad")


def test_the_plain_template_marks_answers(tokenizer):
    _, pool = loaded([{"messages": turns("hi", "yes "), "client": 0}], tokenizer, chat_template="plain")
    assert pool.x[0].tolist() == numbers("### User: hi ### Assistant: yes")
    assert pool.y[0].tolist() == [-100] * 4 + numbers("yes </s>")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "nowhere.jsonl"}, r"data\.path='nowhere\.jsonl'"),
        ({"path": []}, r"data\.path has no rows"),
        ({"path": {"a": 3}}, r"data\.path: 'a' has a int"),
        ({"path": ["text"]}, r"row 0 .* is a str"),
        ({"path": [{"text": "hi"}], "client": "text"}, r"data\.messages: .* text has a known name"),
        ({"path": [{"messages": "hi", "client": 1}]}, r"row 0 .*'hi' where a text is missing"),
        ({"path": [{"prompt": "hi", "response": None, "client": 1}]}, r"row 0 .* role, content"),
        ({"path": [{"prompt": "hi", "response": "yes"}]}, r"data\.client: there is no column 'client'"),
        ({"messages": "talk"}, r"data\.messages: there is no column 'talk'"),
        ({"prompt": "talk"}, r"data\.prompt='talk' and data\.response=None"),
        ({"max_length": 0}, r"data\.max_length=0"),
        ({"loss_on": "user"}, r"data\.loss_on='user'"),
        ({"tokenizer": "no/such-one"}, r"data\.tokenizer='no/such-one'"),
        ({"chat_template": "nofile"}, r"data\.chat_template='nofile'"),
        ({"chat_template": "{{ raise_exception('no roles') }}"}, r"row 0: .*no roles"),
    ],
)
def test_mistakes_are_told(tokenizer, settings, words):
    with pytest.raises(MisconfigurationException, match=words):
        ChatData(**{"path": ROWS, "tokenizer": tokenizer, **settings}).load()


def test_a_tokenizer_without_a_template_needs_one():
    with pytest.raises(MisconfigurationException, match=r"data\.chat_template"):
        ChatData(ROWS, made_tokenizer(None))


def test_a_line_that_is_no_json_is_told_by_its_number(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n\n{oops\n")
    with pytest.raises(MisconfigurationException, match="line 3"):
        loaded(tmp_path / "rows.jsonl", tokenizer)


@pytest.mark.parametrize(("method", "rounds", "rank"), [("FedAvg", 1, 8), ("FedDPA", 2, 16)])
def test_a_command_writes_the_adapters_of_a_run_of_the_command_line(
    tokenizer, tmp_path, monkeypatch, method, rounds, rank
):
    peft = pytest.importorskip("peft", reason="needs the extra lm")
    monkeypatch.chdir(tmp_path)
    checkpoint = fitted(method, tokenizer, rounds)
    with pytest.raises(SystemExit) as ended:
        pfl(f"adapters {checkpoint} adapters")
    assert not ended.value.code
    assert {path.name for path in Path("adapters").iterdir()} == {"Bonn", "Ulm", "global"}
    base = transformers.AutoModelForCausalLM.from_pretrained("model", attn_implementation="sdpa")
    loaded = peft.PeftModel.from_pretrained(base, "adapters/Bonn").eval()
    assert loaded.peft_config["default"].r == rank
    x = torch.tensor([numbers(WHOLE)])
    expected = ClientModule.load_from_checkpoint(checkpoint, client="Bonn").eval()(x)
    torch.testing.assert_close(loaded(input_ids=x).logits, expected, atol=1e-5, rtol=0)


def test_a_command_refuses_a_method_whose_models_are_no_adapters(tokenizer, tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft", reason="needs the extra lm")
    monkeypatch.chdir(tmp_path)
    checkpoint = fitted("FedALT", tokenizer, 1)
    assert refusal(f"adapters {checkpoint} adapters", capsys).startswith("model=FedALT ")
    assert not Path("adapters").exists()


def test_prompts_are_answered_by_each_client_with_the_base_loaded_once_for_all(tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("peft", reason="needs the extra lm")
    monkeypatch.chdir(tmp_path)
    checkpoint = fitted("FedSALoRA", tokenizer, 2)
    Path("prompts.txt").write_text("hi there\nyou\n")
    kind, loads = transformers.AutoModelForCausalLM, []
    load = kind.from_pretrained
    monkeypatch.setattr(
        kind, "from_pretrained", lambda *args, **settings: loads.append(args) or load(*args, **settings)
    )
    given = {}
    for clients in ("all", "Ulm"):
        loads.clear()
        with pytest.raises(SystemExit) as ended:
            pfl(f"predict --ckpt_path {checkpoint} --client {clients} --data prompts.txt --out {clients}.csv")
        assert not ended.value.code
        # one for the configuration's own model, and one for all clients
        assert len(loads) == 2
        with Path(f"{clients}.csv").open(newline="") as file:
            given[clients] = [list(row.values()) for row in csv.DictReader(file)]
    assert [row[0] for row in given["all"]] == ["Bonn", "Bonn", "Ulm", "Ulm"]
    # the client before leaves nothing behind
    assert given["all"][2:] == given["Ulm"]
    model, data = ClientModule.load_from_checkpoint(checkpoint, client="Bonn"), ChatData(ROWS, tokenizer)
    assert given["all"][1][1:] == ["you", *answers(model, data, ["you"])]
