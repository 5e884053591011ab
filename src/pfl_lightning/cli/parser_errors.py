"""Turn the parser's error messages into one sentence each.

jsonargparse tells errors only as English text, often a page that lists every type a value could have had. `SENTENCES`
is the one table of that text: a pattern for each kind of message, with the function that makes the sentence.
`tests/cli/test_parser_errors.py` runs real mistakes through each row, with the oldest and the newest jsonargparse.
"""

import re
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pfl_lightning.cli.class_names import KINDS, class_names, settings
from pfl_lightning.cli.configs import squeezed
from pfl_lightning.cli.refusals import command_is_missing, no_command, no_config, no_option
from pfl_lightning.cli.suggestions import RATES, suggestion
from pfl_lightning.cli.usage import one_line, shortened
from pfl_lightning.cli.yaml_text import no_yaml
from pfl_lightning.client.optimizers import PLATEAU
from pfl_lightning.methods.registry import METHODS
from pfl_lightning.trainer import MEANINGLESS

TYPES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
}
"""Words for Python's types in sentences."""
# jsonargparse indents a message by the depth of the setting: these names give the path to the error
MENTIONED = re.compile(r"""(?P<key>Parser key "[^"]+")|(?P<class>class_path '[^']+')""")
"""Settings and classes that a message names on the way to an error."""
MESSAGE = 20_000
"""Largest number of characters of a message that is searched; only a message with an enormous value has more."""
NOISE = re.compile(
    r"""\s*(-\s)*(Does not validate|Subtypes:|Errors:|Given value|Parser key "[^"]+":\s*$|Problem with given"""
    r"""|Expected a path but|Expected a <class 'NoneType'>)"""
)
"""Lines of a message that say nothing about the mistake."""


class Setting(NamedTuple):
    """The setting behind a message."""

    key: str
    """Dotted name of the setting."""
    owner: str
    """Path of the class that has the setting; empty if unknown."""
    value: str
    """The given value as ``=VALUE``; empty for a mapping or a class."""

    @property
    def kind(self) -> str:
        """The last part of the name, such as ``net``."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True)
class Mistake:
    """A recognised message of the parser; ``mistake[1]`` is the first group of the pattern.

    Args:
        message: the message.
        match: the match of the pattern.
        options: the command's options, without dashes.
    """

    message: str
    match: re.Match[str]
    options: list[str]

    def __getitem__(self, group: int) -> str:
        return self.match[group]

    @cached_property
    def setting(self) -> Setting:
        """The setting where the pattern matches."""
        return locate(self.message, self.match)


def sentence(message: str, options: list[str]) -> str:
    """Return an error of the parser as one sentence.

    Args:
        message: the parser's message; many lines for a setting that may have several types.
        options: the command's options, without dashes.
    """
    # the message quotes the given value, and the time of some patterns grows with the square of a word's length
    message = shortened(message, MESSAGE)
    if (row := row_of(message)) is None:
        return one_line(remaining(message))
    pattern, match = row
    return one_line(SENTENCES[pattern](Mistake(message, match, options)))


def is_unknown(message: str) -> bool:
    """Return True if a message is about an unknown setting or option."""
    row = row_of(shortened(message, MESSAGE))
    return row is not None and SENTENCES[row[0]] in (unknown_setting, unknown_option)


def row_of(message: str) -> tuple[str, re.Match[str]] | None:
    """Return the first pattern of `SENTENCES` in a message, with the match; None for an unknown message."""
    found = ((pattern, re.search(pattern, message)) for pattern in SENTENCES)
    return next(((pattern, match) for pattern, match in found if match), None)


def locate(message: str, match: re.Match[str]) -> Setting:
    """Return the setting of one part of a message, read from the indentation of the lines above."""
    above: list[tuple[int, str, str]] = []
    for line in message[: match.start()].splitlines():
        depth = len(line) - len(line.lstrip(" -"))
        if line.strip():
            # a line indented less closes the settings of the lines before
            above = [entry for entry in above if entry[0] < depth]
        for found in MENTIONED.finditer(line):
            above.append((depth, str(found.lastgroup), re.split("['\"]", found[0])[1]))
    key = ".".join(name for _, kind, name in above if kind == "key")
    # where a class is found by its short name, only the value shows its path
    given = re.search(r"(?:Got|Given) value: \[?Namespace\(class_path='([^']+)'", message[match.end() :])
    if above and above[-1][1] == "class":
        return Setting(key, above[-1][2], value_after(message, match))
    return Setting(key, given[1] if given else "", value_after(message, match))


def value_after(message: str, match: re.Match[str]) -> str:
    """Return the value quoted in a message, as ``=VALUE``."""
    found = re.search(r"(?:Got|Given) value: (.+?)(?:\. Got value: .*)?$", message[match.start() :], re.MULTILINE)
    value = found[1] if found else ""
    # jsonargparse shows its own wrapper around a value given by a dotted option
    if nested := re.fullmatch(r"NestedArg\(key='.*?', val=(.*)\)", value):
        value = nested[1].strip("'")
    # a class or a mapping in full would fill the sentence
    return f"={value}" if value and not value.startswith(("{", "Namespace", "[Namespace")) else ""


def unknown_setting(mistake: Mistake) -> str:
    """Explain a setting unknown to the class."""
    setting, name = mistake.setting, mistake[1]
    if name == "class_path":
        return no_class(mistake)
    # the setting's type itself stands where a class would: a subclass setting without a class
    if setting.owner.startswith("typing."):
        return f"{setting.key}.{name} is given, but no {setting.key}; name its class too."
    names = [known for known in settings(setting.owner) if known != name]
    near = suggestion(name, names, f"{setting.key}.")
    # people look for lr at the model, and no name there is close to it
    if name in RATES and "optimizer" in names:
        near = f"; did you mean {setting.key}.optimizer.{RATES[name]}?"
    return f"{setting.key}.{name} is not a setting of {setting.owner.rpartition('.')[2]}{near}"


def unknown_option(mistake: Mistake) -> str:
    """Explain an option unknown to the command, given on the command line or in a file."""
    name = mistake[1].split("=")[0]
    key = name.removeprefix("--")
    if advice := MEANINGLESS.get(key.removeprefix("trainer.")):
        return f"{key} means nothing in a federation: {advice}."
    if not name.startswith("-") and "unrecognized" in mistake[0]:
        return f"{name} is given without an option; options begin with --."
    return no_option(key, mistake.options)


def missing_setting(mistake: Mistake) -> str:
    """Explain a missing setting without a default."""
    names = [name.partition(".")[2] or name for name in mistake[1].split(", ")]
    setting = mistake.setting
    if setting.key:
        return f"{setting.key}: {setting.owner.rpartition('.')[2]} needs {' and '.join(names)}."
    return f"nothing is given for {' and '.join(names)}; name it by --{' and --'.join(names)}, or in a --config."


def no_class(mistake: Mistake) -> str:
    """Explain settings given where a class with settings is expected."""
    setting = mistake.setting
    return (
        f"{setting.key}{setting.value} must be a class: class_path names it, and its settings belong under "
        f"init_args{choices_of(setting)}."
    )


def choices_of(setting: Setting) -> str:
    """Return the end of a sentence with the classes that a setting takes, unless they are many."""
    names = class_names(setting.kind)
    # a long list of names would bury the advice
    return f"; choose from {', '.join(sorted(names))}" if len(names) < 9 else ""


def abstract_class(mistake: Mistake) -> str:
    """Explain an abstract class, or settings without a class."""
    setting, name = mistake.setting, mistake[1] or mistake.setting.value[1:]
    if setting.kind not in KINDS or name.rpartition(".")[2] != KINDS[setting.kind].__name__:
        return f"{setting.key}={name} is abstract; define all methods that its base leaves open."
    # settings without a class_path: the parser took the base class, which is abstract
    if setting.value.rpartition(".")[2] != KINDS[setting.kind].__name__:
        return (
            f"{setting.key} has settings and no class; choose from {', '.join(sorted(class_names(setting.kind)))}, "
            "or put the --config that names it before its settings."
        )
    return f"{setting.key}={name} is abstract{choices_of(setting) or '; name a class that defines the rest'}."


def unknown_class(mistake: Mistake) -> str:
    """Explain a class name without an imported class."""
    setting, name = mistake.setting, mistake[1]
    if setting.key in SIDES and (advice := advice_on(name, SIDES[setting.key])):
        return f"{setting.key}={name} {advice}"
    return f"{setting.key}={name} is no known class{suggestion(name.rpartition('.')[2], class_names(setting.kind))}"


def other_class(mistake: Mistake) -> str:
    """Explain a class of a wrong kind."""
    setting, name = mistake.setting, mistake[1]
    near = suggestion(name.rpartition(".")[2], class_names(setting.kind))
    return f"{setting.key}={name} is no {mistake[2]}{near}"


def wrong_value(mistake: Mistake) -> str:
    """Explain a value of a wrong type, or outside the choices.

    A message lists a complaint for each type that was tried; the deepest setting is the one that the user got wrong.
    """
    message = mistake.message
    found = [(locate(message, each), each[1]) for each in re.finditer(WRONG, message)]
    setting = max((setting for setting, _ in found), key=lambda setting: setting.key.count("."))
    types = list(dict.fromkeys(kind for other, kind in found if other.key == setting.key))
    literals = [kind for kind in types if kind.startswith("typing.Literal")]
    choices = [str(choice) for kind in literals for choice in literal_eval(kind.removeprefix("typing.Literal"))]
    names = [
        re.sub(r".*?([\w]+)'?>?$", r"\1", kind) for kind in types if "NoneType" not in kind and kind not in literals
    ]
    allowed = [TYPES.get(name, name) for name in names]
    near = "."
    if choices:
        # the same Literal can be tried twice, as of Optional[Literal[...]]
        choices = list(dict.fromkeys(choices))
        near = suggestion(setting.value.removeprefix("="), choices)
        allowed.append(f"one of {', '.join(choices)}")
    return f"{setting.key}{setting.value} must be {' or '.join(allowed)}{near if 'mean' in near else '.'}"


SIDES = {"model": "client module", "aggregator": "aggregator"}
"""Both sides of a method by their settings, in words."""


def advice_on(name: str, side: str) -> str:
    """Return how to run a method given by name as one of its sides; empty for an unknown method.

    >>> advice_on("FedAWA", "client module")
    'is a server side; give --config methods/fedawa, or --aggregator FedAWA.'
    >>> advice_on("FedAWA-L", "aggregator")
    'is no aggregator but a method; give --config methods/fedawa_l.'

    Args:
        name: the given name.
        side: the side, in words.
    """
    name = name.rpartition(".")[2]
    server = name in class_names("aggregator")
    # a method's name can be no class at all: q-FedAvg is the client QFedAvg with the server FairAverage
    method = next((each for each in METHODS if squeezed(each.name) == squeezed(name)), None)
    if method is not None:
        ways = [f"--config methods/{method.file}"]
        ways += [f"--aggregator {name}"] if server else []
        return f"is {'a server side' if server else f'no {side} but a method'}; give {', or '.join(ways)}."
    return f"is a server side; give --aggregator {name}." if server else ""


def no_value(mistake: Mistake) -> str:
    """Explain an option without a value, or with a dash at the value's beginning."""
    name = mistake[1].rpartition("/")[2]
    # --model alone is often a forgotten --model.NAME
    below = " or a setting below it" if any(f"--{each}".startswith(f"{name}.") for each in mistake.options) else ""
    return f"{name}{below} needs a value; one that begins with a dash is given as --NAME=VALUE."


def no_mapping(mistake: Mistake) -> str:
    """Explain a single value given where settings by name are expected."""
    below = next((each for each in sorted(mistake.options) if each.startswith(f"{mistake[1]}.")), mistake[1])
    return f"{mistake[1]}={mistake[2]} must be settings by name, such as --{below}."


def remaining(message: str) -> str:
    """Return an unrecognised message without the lines on types."""
    lines = [match for match in re.finditer(r"^.*\S.*$", message, re.MULTILINE) if not NOISE.match(match[0])]
    if not lines:
        return message
    setting = locate(message, lines[0])
    text = re.sub(r"\. Got value:.*|Type .* callable class: ", "", lines[0][0]).lstrip(" -")
    return f"{setting.key}{setting.value}: {text}" if setting.key else " ".join(line[0] for line in lines)


WRONG = r"Expected a (<class '[\w.]+'>|typing\.Literal\[.*?\])"
SENTENCES: dict[str, Callable[[Mistake], str]] = {
    # names
    r"Option '([^']+)' is not accepted": unknown_setting,
    r"does not accept option '([^']+)'": unknown_option,
    r"unrecognized arguments: (\S+)": unknown_option,
    r"subcommand: invalid choice: '([^']*)'": lambda mistake: no_command(mistake[1]),
    r'expected "subcommand" to be one of': lambda mistake: command_is_missing(),
    r"(?m)arguments are required: (.+?)(?=\. Got value: |$)": missing_setting,
    r"argument (\S+): expected one argument": no_value,
    # configurations
    r"(?:File|Path) is not readable: '(.+)'": lambda mistake: (
        f"--config {mistake[1]} is not readable; let it be read, or take another file."
    ),
    r"(?:File does not exist|Path is not a file): '(.+)'": lambda mistake: no_config(Path(mistake[1])),
    # refused by `yaml_text.check`, with a sentence of ours
    r"(?:sub-config file (\S+): )?(the YAML has .+)": lambda mistake: ": ".join(filter(None, mistake.match.groups())),
    r"(?s)(?:Problems parsing config: |Parser key \"config\": (?=while ))(.+)": lambda mistake: no_yaml(mistake[1]),
    r"Unexpected config: ": lambda mistake: (
        "the configuration holds no settings; it must be YAML of the form 'NAME: VALUE'."
    ),
    # values that neither YAML nor a class can be made of
    r"unsupported operand type\(s\) for \+: '\w+' and 'str'": lambda mistake: (
        # a number with a colon at its end, on which jsonargparse's YAML reader fails with a TypeError
        f"{mistake.setting.key} can't be read; take away the colon at its end, or put it in quotes."
    ),
    r"Multiple subclasses with name ReduceLROnPlateau": lambda mistake: PLATEAU,
    r"Parser key \"([\w.]+)\":\s+Unable to load config '(.*)'": no_mapping,
    r"'NoneType' object has no attribute 'keys'|argument of type 'NoneType' is not iterable": lambda mistake: (
        f"{mistake.setting.key}: class_path or init_args is null; give it a value, or leave it out."
    ),
    # types, the deepest setting first
    r"Subtypes: \[<class 'float'>, <class 'torch.Tensor'>\]": lambda mistake: (
        f"{mistake.setting.key}{mistake.setting.value} must be a number."
    ),
    r"Expected a tuple with (\d+) elements": lambda mistake: (
        f"{mistake.setting.key}{mistake.setting.value} must be a list of {mistake[1]}."
    ),
    r"a function or a callable class: Expected '([\w.]+)' to be a function that returns": lambda mistake: (
        f"{mistake.setting.key}={mistake[1]} is a function whose annotation doesn't say what it returns; write "
        f"def {mistake[1].rpartition('.')[2]}(input_shape, num_classes) -> nn.Module."
    ),
    r"Expected '([\w.]+)' to be a subclass of <class '(\w+)'>": other_class,
    r"(?:Problem with given class_path '([^']+)':\s+|callable class: )(No module named '\w+')": lambda mistake: (
        f"{mistake.setting.key}{'=' + mistake[1] if mistake[1] else mistake.setting.value}: {mistake[2]}"
    ),
    r"Parser key \"\w+\":\s+Expected a <class '(?!NoneType)\w+'>": wrong_value,
    r"Expected a dot import path string: (\S+)(?=[\s\S]*Not a valid subclass of Callback)": unknown_class,
    r"Expected an instantiatable class, but (?:(\S+) )?is abstract": abstract_class,
    r"Not a valid subclass of \w+": no_class,
    r"Expected a dot import path string: (\S+)": unknown_class,
    r"Expected a path but (\S+) either(?=[\s\S]*has no attribute)": unknown_class,
    r"Expected a (?:<class '(?!NoneType)[\w.]+'>|typing\.Literal)": wrong_value,
}
"""Patterns of jsonargparse's messages, the most specific first, each with the function that makes the sentence."""
