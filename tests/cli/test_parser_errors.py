"""The table of the parser's sentences, run through by real mistakes: a row that none reaches is a changed message."""

import os
import re
from pathlib import Path

import pytest

from pfl_lightning.cli import load_config
from pfl_lightning.cli.argv import CommandLine
from pfl_lightning.cli.class_names import own_server
from pfl_lightning.cli.load_config import Complaint, new_parser
from pfl_lightning.cli.parser_errors import SENTENCES, row_of, sentence
from pfl_lightning.data import FederatedDataModule, Partitioner

Q = "fit --config quickstart"
FILE = "--config mine.yaml"


class Unfinished(Partitioner):
    """A partitioner of one's own without `split`."""


class NoData(FederatedDataModule):
    """Data of one's own without `load`."""


# the beginning of a pattern, a mistake, the settings and values that its sentence names, and the file's content
ROWS = [
    ("Option '", f"{Q} --model FedProx --model.mue 3", "model.mue .* FedProx; did you mean model.mu?"),
    ("Option '", f"{Q} --model.lr 3", "model.lr .* WDR; did you mean model.optimizer.lr?"),
    ("Option '", f"{Q} --model.lr_scheduler.gamma 3", "model.lr_scheduler.gamma .* name its class too."),
    ("Option '", f"{Q} {FILE}", "mine.yaml: data .* class_path .* init_args.", "data: {class_path: Digits, bad: 3}"),
    ("does not accept", f"{Q} {FILE}", "trainer.max_round .* trainer.max_rounds?", "trainer: {max_round: 3}"),
    ("does not accept", f"{Q} {FILE}", "trainer.max_epochs .* give max_rounds.", "trainer: {max_epochs: 3}"),
    ("unrecognized", f"{Q} --modle FedPer", "modle .* model?"),
    ("unrecognized", f"{Q} extra", "extra .* --."),
    ("subcommand: invalid", "fti", "'fti' .* fit?"),
    ('expected "subcommand"', "", "choose from fit, "),
    ("(?m)arguments are", "fit", "data; name it by --data"),
    ("(?m)arguments are", f"{Q} --model.lr_scheduler StepLR", "model.lr_scheduler: StepLR needs step_size."),
    ("argument (", f"{Q} --trainer.gradient_clip_val -.inf", "--trainer.gradient_clip_val .* --NAME=VALUE."),
    ("argument (", f"{Q} --model", "--model or a setting below it needs"),
    ("(?:File|Path) is not", f"{Q} --config secret.yaml", "--config .*secret.yaml is not readable"),
    ("(?:File does not", f"{Q} --config gone.yaml", "--config gone.yaml is no file"),
    ("(?:File does not", f"{Q} --config .", "is no file."),
    ("(?:sub-config", f"{Q} {FILE}", "mine.yaml: the YAML has a twice", "{a: 1, a: 2}"),
    ("(?:sub-config", f"{Q} --data mine.yaml", "mine.yaml: the YAML has a twice", "{a: 1, a: 2}"),
    ("(?s)(?:Problems", f"{Q} {FILE}", "mine.yaml: .* not valid YAML: while .* line 1, column 8", "model: {a: b"),
    ("(?s)(?:Problems", f"{Q} {FILE}", "mine.yaml: .* not valid YAML: found undefined alias", "a: *b"),
    ("(?s)(?:Problems", f"{Q} --config {{trainer", "not valid YAML: while .* line 1, column 1"),
    ("Unexpected config", f"{Q} {FILE}", "mine.yaml: .* holds no settings", "just text"),
    ("Unexpected config", f"{Q} --config [1,2]", "holds no settings"),
    ("unsupported operand", f"{Q} --trainer.max_rounds 1:", "trainer.max_rounds .* colon"),
    ("Multiple subclasses", f"{Q} --model.lr_scheduler ReduceLROnPlateau", "model.lr_scheduler=ReduceLROnPlateau"),
    ('Parser key \\"([', f"{Q} --trainer null", "trainer=null .* --trainer.accelerator."),
    ("'NoneType'", f"{Q} {FILE}", "model: class_path or init_args is null", "model: {init_args: null}"),
    ("Subtypes:", f"{Q} --model.optimizer.lr nan", "model.optimizer.lr=nan must be a number."),
    ("Expected a tuple", f"{Q} --model.optimizer Adam --model.optimizer.betas [0.9]", "betas=[0.9] .* list of 2."),
    ("a function or", f"{Q} --model.net textwrap.dedent", "model.net=textwrap.dedent .* def dedent.* -> nn.Module."),
    ("Expected '", f"{Q} --model.net torch.optim.SGD", "model.net=torch.optim.SGD is no Net"),
    ("(?:Problem with", f"{Q} --model nowhere.Method", "model=nowhere.Method: No module named 'nowhere'."),
    ("(?:Problem with", f"{Q} --model.net nowhere.Net", "model.net=nowhere.Net: No module named 'nowhere'."),
    ('Parser key \\"\\w', f"{Q} --data.batch_size 1.5", "data.batch_size=1.5 must be an integer."),
    ('Parser key \\"\\w', f"{Q} --model.net.hidden x", "model.net.hidden=x must be a list."),
    ("Expected a dot import path string: (\\S+)(?=", f"{Q} --trainer.callbacks [Unknown]", "callbacks=Unknown is no"),
    ("Expected an inst", f"{Q} --trainer.cohort.size 3", "trainer.cohort has settings and no class; .*"),
    ("Expected an inst", f"{Q} --data.partitioner test_parser_errors.Unfinished", "Unfinished is abstract; define all"),
    (
        "Expected an inst",
        f"{Q} --data.partitioner pfl_lightning.data.Partitioner",
        "is abstract; ",
    ),
    ("Expected an inst", f"{Q} --data test_parser_errors.NoData", "data=test_parser_errors.NoData is abstract"),
    ("Not a valid", f"{Q} --data.partitioner [3]", "data.partitioner=[3] must be a class: "),
    ("Not a valid", f"fit {FILE}", "mine.yaml: data must be a class", "data: {init_args: {a: 1}}"),
    ("Expected a dot import path string: (\\S+)", f"{Q} --data MINST", "data=MINST .* MNIST or EMNIST?"),
    ("Expected a dot import path string: (\\S+)", f"{Q} --model FedAWA", "model=FedAWA .* --aggregator FedAWA."),
    ("Expected a dot import path string: (\\S+)", f"{Q} --model.optimizer Adma", "model.optimizer=Adma .* or Adam?"),
    ("Expected a path", f"{Q} --model.optimizer torch.optim.Adma", "model.optimizer=torch.optim.Adma .* or Adam?"),
    ("Expected a path", f"{Q} --model.net pfl_lightning.nets.MPL", "model.net=pfl_lightning.nets.MPL .* MLP?"),
    ("Expected a (?:", f"{Q} --trainer.max_rounds x", "trainer.max_rounds=x must be an integer."),
    ("Expected a (?:", f"{Q} --trainer.clients_per_round x", "=x must be an integer or a number."),
    ("Expected a (?:", f"{Q} --trainer.evaluate befor", "=befor .* before, after, both; did you mean before?"),
    ("Expected a (?:", f"{Q} --trainer.deterministic x", "=x must be true or false or one of warn."),
]


def pattern_of(beginning: str) -> str:
    """The pattern that is, or else begins, so."""
    return beginning if beginning in SENTENCES else next(each for each in SENTENCES if each.startswith(beginning))


@pytest.fixture(scope="module")
def parser():
    return new_parser()


@pytest.mark.parametrize("case", ROWS, ids=lambda case: " ".join([case[1], *case[3:]]))
@pytest.mark.by_default(but=["config quickstart --model FedP", "ckstart --model.lr_scheduler S"])
def test_a_mistake_meets_its_row_and_gets_its_sentence(case, parser, monkeypatch, tmp_path):
    beginning, line, wanted, *content = case
    (tmp_path / "mine.yaml").write_text("".join(content))
    (tmp_path / "secret.yaml").touch()
    access, denied = os.access, (os.R_OK, "secret.yaml")
    # the superuser may read all files
    monkeypatch.setattr(os, "access", lambda path, mode: access(path, mode) and (mode, Path(path).name) != denied)
    messages = []
    monkeypatch.setattr(
        load_config, "sentence", lambda message, names: messages.append(message) or sentence(message, names)
    )
    with pytest.raises(Complaint) as said:
        parser.parse_args(CommandLine(line.split()).completed(own_server))
    (message,) = messages
    assert row_of(message)[0] == pattern_of(beginning), message
    pattern = ".*".join(map(re.escape, wanted.split(".*")))
    assert re.search(pattern, str(said.value)), said.value


def test_every_row_is_met():
    assert {pattern_of(case[0]) for case in ROWS} == SENTENCES.keys()
