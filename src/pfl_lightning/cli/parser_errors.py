"""Turn the parser's error messages into one sentence each.

jsonargparse tells errors only as English text, often a page that lists every type a value could have had.
`EXPLANATIONS` recognises each kind of message; an explanation takes the message, the match, and the command's options.
"""

import re
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pfl_lightning.cli.class_names import KINDS, class_names, settings
from pfl_lightning.cli.configs import squeezed
from pfl_lightning.cli.refusals import command_is_missing, no_command, no_config, no_option, no_yaml
from pfl_lightning.cli.suggestions import RATES, suggestion
from pfl_lightning.cli.usage import one_line, shortened
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


def sentence(message: str, options: list[str]) -> str:
    """Return an error of the parser as one sentence.

    Args:
        message: the parser's message; many lines for a setting that may have several types.
        options: the command's options, without dashes.
    """
    # the message quotes the given value, and the time of some patterns grows with the square of a word's length
    message = shortened(message, MESSAGE)
    explain, match = explanation(message)
    return one_line(explain(message, match, options) if match else remaining(message))


def is_unknown(message: str) -> bool:
    """Return True if a message is about an unknown setting or option."""
    return explanation(shortened(message, MESSAGE))[0] in (unknown_setting, unknown_option)


def explanation(message: str) -> tuple[Callable[[str, re.Match[str], list[str]], str], re.Match[str] | None]:
    """Return the explaining function and the match of a message; the match is None for an unknown message."""
    found = ((explain, re.search(pattern, message)) for pattern, explain in EXPLANATIONS.items())
    # the function for no match is never called; `is_unknown` only asks that it explains nothing unknown
    return next((pair for pair in found if pair[1]), (no_settings, None))


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


def unknown_setting(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a setting unknown to the class."""
    setting, name = locate(message, match), match[1]
    if name == "class_path":
        return no_class(message, match, options)
    # the setting's type itself stands where a class would: a subclass setting without a class
    if setting.owner.startswith("typing."):
        return f"{setting.key}.{name} is given, but no {setting.key}; name its class too."
    names = [known for known in settings(setting.owner) if known != name]
    near = suggestion(name, names, f"{setting.key}.")
    # people look for lr at the model, and no name there is close to it
    if name in RATES and "optimizer" in names:
        near = f"; did you mean {setting.key}.optimizer.{RATES[name]}?"
    return f"{setting.key}.{name} is not a setting of {setting.owner.rpartition('.')[2]}{near}"


def unknown_option(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain an option unknown to the command, given on the command line or in a file."""
    name = match[1].split("=")[0]
    key = name.removeprefix("--")
    if advice := MEANINGLESS.get(key.removeprefix("trainer.")):
        return f"{key} means nothing in a federation: {advice}."
    if not name.startswith("-") and "unrecognized" in match[0]:
        return f"{name} is given without an option; options begin with --."
    return no_option(key, options)


def unknown_command(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain an unknown command."""
    return no_command(match[1])


def missing_command(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a command line without a command."""
    return command_is_missing()


def missing_setting(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a missing setting without a default."""
    names = [name.partition(".")[2] or name for name in match[1].split(", ")]
    setting = locate(message, match)
    if setting.key:
        return f"{setting.key}: {setting.owner.rpartition('.')[2]} needs {' and '.join(names)}."
    return f"nothing is given for {' and '.join(names)}; name it by --{' and --'.join(names)}, or in a --config."


def no_file(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a missing configuration file."""
    return no_config(Path(match[1]))


def unreadable(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a configuration file without permission to read."""
    return f"--config {match[1]} is not readable; let it be read, or take another file."


def no_text(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a configuration with invalid YAML."""
    return no_yaml(match[1])


def refused_text(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain YAML refused by `yaml_text.check`."""
    return f"{match[1]}: {match[2]}" if match[1] else match[2]


def no_settings(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a configuration without settings."""
    return "the configuration holds no settings; it must be YAML of the form 'NAME: VALUE'."


def no_class(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain settings given where a class with settings is expected."""
    setting = locate(message, match)
    names = class_names(setting.key.rpartition(".")[2])
    # a long list of names would bury the advice
    listed = f"; choose from {', '.join(sorted(names))}" if len(names) < 9 else ""
    return (
        f"{setting.key}{setting.value} must be a class: class_path names it, and its settings belong under "
        f"init_args{listed}."
    )


def abstract_class(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain an abstract class, or settings without a class."""
    setting = locate(message, match)
    kind = setting.key.rpartition(".")[2]
    if kind in KINDS and match[1].rpartition(".")[2] == KINDS[kind].__name__:
        # settings without a class_path: the parser took the base class, which is abstract
        return f"{setting.key} has settings and no class; choose from {', '.join(sorted(class_names(kind)))}."
    return f"{setting.key}={match[1]} is abstract; define all methods that its base leaves open."


def unknown_class(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a class name without an imported class."""
    setting = locate(message, match)
    if setting.key == "model" and (advice := advice_on(match[1])):
        return f"model={match[1]} {advice}"
    near = suggestion(match[1].rpartition(".")[2], class_names(setting.key.rpartition(".")[2]))
    return f"{setting.key}={match[1]} is no known class{near}"


def wrong_value(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a value of a wrong type, or outside the choices.

    A message lists a complaint for each type that was tried; the deepest setting is the one that the user got wrong.
    """
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


def no_number(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain text given where a number, or a tensor with one element, is expected."""
    setting = locate(message, match)
    return f"{setting.key}{setting.value} must be a number."


def wrong_length(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a list with too many or too few values."""
    setting = locate(message, match)
    return f"{setting.key}{setting.value} must be a list of {match[1]}."


def advice_on(name: str) -> str:
    """Return how to run a method given by name as a client module; empty for an unknown method.

    >>> advice_on("FedAWA")
    'is a server side; give --config methods/fedawa, or --aggregator FedAWA.'
    """
    name = name.rpartition(".")[2]
    server = name in class_names("aggregator")
    # a method's name can be no class at all: q-FedAvg is the client QFedAvg with the server FairAverage
    method = next((each for each in METHODS if squeezed(each.name) == squeezed(name)), None)
    if method is not None:
        ways = [f"--config methods/{method.file}"]
        ways += [f"--aggregator {name}"] if server else []
        return f"is {'a server side' if server else 'no client module but a method'}; give {', or '.join(ways)}."
    return f"is a server side; give --aggregator {name}." if server else ""


def other_class(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a class of a wrong kind."""
    setting = locate(message, match)
    if setting.key == "model" and (advice := advice_on(match[1])):
        return f"model={match[1]} {advice}"
    names = class_names(setting.key.rpartition(".")[2])
    return f"{setting.key}={match[1]} is no {match[2]}{suggestion(match[1].rpartition('.')[2], names)}"


def no_module(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a class path with a missing module."""
    setting = locate(message, match)
    return f"{setting.key}={match[1]}: {match[2]}"


def no_value(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain an option without a value, or with a dash at the value's beginning."""
    name = match[1].rpartition("/")[2]
    # --model alone is often a forgotten --model.NAME
    below = " or a setting below it" if any(f"--{option}".startswith(f"{name}.") for option in options) else ""
    return f"{name}{below} needs a value; one that begins with a dash is given as --NAME=VALUE."


def no_mapping(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a single value given where settings by name are expected."""
    return f"{match[1]}={match[2]} must be settings by name, such as {nested(match[1], options)}."


def no_reading(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a number followed by a colon, on which jsonargparse's YAML reader fails with a TypeError."""
    return f"{locate(message, match).key} can't be read; take away the colon at its end, or put it in quotes."


def null_class(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain a class, or the settings of a class, given as null."""
    return f"{locate(message, match).key}: class_path or init_args is null; give it a value, or leave it out."


def plateau(message: str, match: re.Match[str], options: list[str]) -> str:
    """Explain the ambiguous name ReduceLROnPlateau: neither Lightning's class nor torch's counts rounds."""
    return PLATEAU


def nested(name: str, options: list[str]) -> str:
    """Return an example of an option below another one."""
    return f"--{next((option for option in sorted(options) if option.startswith(f'{name}.')), name)}"


def remaining(message: str) -> str:
    """Return an unrecognised message without the lines on types."""
    lines = [match for match in re.finditer(r"^.*\S.*$", message, re.MULTILINE) if not NOISE.match(match[0])]
    if not lines:
        return message
    setting = locate(message, lines[0])
    text = re.sub(r"\. Got value:.*|Type .* callable class: ", "", lines[0][0]).lstrip(" -")
    return f"{setting.key}{setting.value}: {text}" if setting.key else " ".join(line[0] for line in lines)


WRONG = r"Expected a (<class '[\w.]+'>|typing\.Literal\[.*?\])"
EXPLANATIONS: dict[str, Callable[[str, re.Match[str], list[str]], str]] = {
    r"Option '([^']+)' is not accepted": unknown_setting,
    r"does not accept option '([^']+)'": unknown_option,
    r"unrecognized arguments: (\S+)": unknown_option,
    r"subcommand: invalid choice: '([^']*)'": unknown_command,
    r'expected "subcommand" to be one of': missing_command,
    r"(?m)arguments are required: (.+?)(?=\. Got value: |$)": missing_setting,
    r"argument (\S+): expected one argument": no_value,
    r"(?:File|Path) is not readable: '(.+)'": unreadable,
    r"(?:File does not exist|Path is not a file): '(.+)'": no_file,
    r"(?:sub-config file (\S+): )?(the YAML has .+)": refused_text,
    r"(?s)(?:Problems parsing config|Parser key \"config\"): (while .+)": no_text,
    r"(?s)Problems parsing config: (.+)": no_text,
    r"Unexpected config: ": no_settings,
    r"unsupported operand type\(s\) for \+: '\w+' and 'str'": no_reading,
    r"Multiple subclasses with name ReduceLROnPlateau": plateau,
    r"Parser key \"([\w.]+)\":\s+Unable to load config '(.*)'": no_mapping,
    r"'NoneType' object has no attribute 'keys'|argument of type 'NoneType' is not iterable": null_class,
    r"Subtypes: \[<class 'float'>, <class 'torch.Tensor'>\]": no_number,
    r"Expected a tuple with (\d+) elements": wrong_length,
    r"Expected '([\w.]+)' to be a subclass of <class '(\w+)'>": other_class,
    r"Problem with given class_path '([^']+)':\s+(No module named '\w+')": no_module,
    r"Parser key \"\w+\":\s+Expected a <class '(?!NoneType)\w+'>": wrong_value,
    r"Expected a dot import path string: (\S+)(?=[\s\S]*Not a valid subclass of Callback)": unknown_class,
    r"Expected an instantiatable class, but (\S+) is abstract": abstract_class,
    r"Expected an instantiatable class|Not a valid subclass of \w+": no_class,
    r"Expected a dot import path string: (\S+)": unknown_class,
    r"Expected a path but (\S+) either(?=[\s\S]*has no attribute)": unknown_class,
    r"Expected a (?:<class '(?!NoneType)[\w.]+'>|typing\.Literal)": wrong_value,
}
"""Patterns of jsonargparse's messages, the most specific first, with the function that explains a match."""
