"""What users get wrong, in one sentence: the complaints of the parser."""

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
MENTIONED = re.compile(r"""(?P<key>Parser key "[^"]+")|(?P<class>class_path '[^']+')""")
MESSAGE = 20_000
"""Characters of the parser's messages that are looked at; without a value of any length they have far fewer."""
NOISE = re.compile(
    r"""\s*(-\s)*(Does not validate|Subtypes:|Errors:|Given value|Parser key "[^"]+":\s*$|Problem with given"""
    r"""|Expected a path but|Expected a <class 'NoneType'>)"""
)


class Setting(NamedTuple):
    """Where in the configuration a complaint belongs."""

    key: str
    """The setting, dotted."""
    owner: str
    """The class path whose setting is at fault."""
    value: str
    """What was given, as ``=VALUE``; empty where it is long."""


def sentence(message: str, options: list[str]) -> str:
    """Return a complaint of the parser as one sentence.

    Args:
        message: the parser's message, of many lines where a setting could be of several types.
        options: the command line's options, without dashes.
    """
    # it holds all that was given, and some patterns take time with the square of a word's length
    message = shortened(message, MESSAGE)
    explain, match = explanation(message)
    return one_line(explain(message, match, options) if match else remaining(message))


def is_unknown(message: str) -> bool:
    """Whether a complaint of the parser is that there is no such setting, or no such option."""
    return explanation(shortened(message, MESSAGE))[0] in (unknown_setting, unknown_option)


def explanation(message: str) -> tuple[Callable[[str, re.Match[str], list[str]], str], re.Match[str] | None]:
    """Return how a message is explained, and where it says so; no such place if it isn't recognised."""
    found = ((explain, re.search(pattern, message)) for pattern, explain in EXPLANATIONS.items())
    return next((pair for pair in found if pair[1]), (no_settings, None))


def locate(message: str, match: re.Match[str]) -> Setting:
    """Finds the setting that a part of a message is about, by the indentation of what stands above it."""
    above: list[tuple[int, str, str]] = []
    for line in message[: match.start()].splitlines():
        depth = len(line) - len(line.lstrip(" -"))
        if line.strip():
            above = [entry for entry in above if entry[0] < depth]
        for found in MENTIONED.finditer(line):
            above.append((depth, str(found.lastgroup), re.split("['\"]", found[0])[1]))
    key = ".".join(name for _, kind, name in above if kind == "key")
    given = re.search(r"(?:Got|Given) value: \[?Namespace\(class_path='([^']+)'", message[match.end() :])
    if above and above[-1][1] == "class":
        return Setting(key, above[-1][2], value_after(message, match))
    return Setting(key, given[1] if given else "", value_after(message, match))


def value_after(message: str, match: re.Match[str]) -> str:
    """The value that a part of a message is about."""
    found = re.search(r"(?:Got|Given) value: (.+?)(?:\. Got value: .*)?$", message[match.start() :], re.MULTILINE)
    value = found[1] if found else ""
    if nested := re.fullmatch(r"NestedArg\(key='.*?', val=(.*)\)", value):
        value = nested[1].strip("'")
    return f"={value}" if value and not value.startswith(("{", "Namespace", "[Namespace")) else ""


def unknown_setting(message: str, match: re.Match[str], options: list[str]) -> str:
    """A class has no such setting."""
    setting, name = locate(message, match), match[1]
    if name == "class_path":
        return no_class(message, match, options)
    if setting.owner.startswith("typing."):
        return f"{setting.key}.{name} is given, but no {setting.key}; name its class too."
    names = [known for known in settings(setting.owner) if known != name]
    near = suggestion(name, names, f"{setting.key}.")
    if name in RATES and "optimizer" in names:
        near = f"; did you mean {setting.key}.optimizer.{RATES[name]}?"
    return f"{setting.key}.{name} is not a setting of {setting.owner.rpartition('.')[2]}{near}"


def unknown_option(message: str, match: re.Match[str], options: list[str]) -> str:
    """The command has no such option, by command line or file."""
    name = match[1].split("=")[0]
    key = name.removeprefix("--")
    if advice := MEANINGLESS.get(key.removeprefix("trainer.")):
        return f"{key} means nothing in a federation: {advice}."
    if not name.startswith("-") and "unrecognized" in match[0]:
        return f"{name} is given without an option; options begin with --."
    return no_option(key, options)


def unknown_command(message: str, match: re.Match[str], options: list[str]) -> str:
    """There is no such subcommand."""
    return no_command(match[1])


def missing_command(message: str, match: re.Match[str], options: list[str]) -> str:
    """No subcommand is given."""
    return command_is_missing()


def missing_setting(message: str, match: re.Match[str], options: list[str]) -> str:
    """Something that has no default isn't given."""
    names = [name.partition(".")[2] or name for name in match[1].split(", ")]
    setting = locate(message, match)
    if setting.key:
        return f"{setting.key}: {setting.owner.rpartition('.')[2]} needs {' and '.join(names)}."
    return f"nothing is given for {' and '.join(names)}; name it by --{' and --'.join(names)}, or in a --config."


def no_file(message: str, match: re.Match[str], options: list[str]) -> str:
    """A configuration file isn't there."""
    return no_config(Path(match[1]))


def unreadable(message: str, match: re.Match[str], options: list[str]) -> str:
    """A configuration file is there, and this user can't read it."""
    return f"--config {match[1]} is not readable; let it be read, or take another file."


def no_text(message: str, match: re.Match[str], options: list[str]) -> str:
    """A configuration file can't be read."""
    return no_yaml(match[1])


def refused_text(message: str, match: re.Match[str], options: list[str]) -> str:
    """YAML can't be taken, by our own check of it."""
    return f"{match[1]}: {match[2]}" if match[1] else match[2]


def no_settings(message: str, match: re.Match[str], options: list[str]) -> str:
    """A configuration file holds something else."""
    return "the configuration holds no settings; it must be YAML of the form 'NAME: VALUE'."


def no_class(message: str, match: re.Match[str], options: list[str]) -> str:
    """Settings stand where a class with settings is asked for."""
    setting = locate(message, match)
    names = class_names(setting.key.rpartition(".")[2])
    listed = f"; choose from {', '.join(sorted(names))}" if len(names) < 9 else ""
    return (
        f"{setting.key}{setting.value} must be a class: class_path names it, and its settings belong under "
        f"init_args{listed}."
    )


def abstract_class(message: str, match: re.Match[str], options: list[str]) -> str:
    """A class lacks methods of its base."""
    setting = locate(message, match)
    kind = setting.key.rpartition(".")[2]
    if kind in KINDS and match[1].rpartition(".")[2] == KINDS[kind].__name__:
        # what is left of settings without a class
        return f"{setting.key} has settings and no class; choose from {', '.join(sorted(class_names(kind)))}."
    return f"{setting.key}={match[1]} is abstract; define all methods that its base leaves open."


def unknown_class(message: str, match: re.Match[str], options: list[str]) -> str:
    """No class of this name is known."""
    setting = locate(message, match)
    if setting.key == "model" and (advice := advice_on(match[1])):
        return f"model={match[1]} {advice}"
    near = suggestion(match[1].rpartition(".")[2], class_names(setting.key.rpartition(".")[2]))
    return f"{setting.key}={match[1]} is no known class{near}"


def wrong_value(message: str, match: re.Match[str], options: list[str]) -> str:
    """A value is not of the setting's type, or not one of its choices: the innermost of all complaints counts."""
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
        choices = list(dict.fromkeys(choices))
        near = suggestion(setting.value.removeprefix("="), choices)
        allowed.append(f"one of {', '.join(choices)}")
    return f"{setting.key}{setting.value} must be {' or '.join(allowed)}{near if 'mean' in near else '.'}"


def no_number(message: str, match: re.Match[str], options: list[str]) -> str:
    """A number is asked for, or a tensor of one, whose complaint is about a class."""
    setting = locate(message, match)
    return f"{setting.key}{setting.value} must be a number."


def wrong_length(message: str, match: re.Match[str], options: list[str]) -> str:
    """A list has too many values or too few."""
    setting = locate(message, match)
    return f"{setting.key}{setting.value} must be a list of {match[1]}."


def advice_on(name: str) -> str:
    """How to run a method whose name stands where a client module is asked for; empty if it is none.

    >>> advice_on("FedAWA")
    'is a server side; give --config methods/fedawa, or --aggregator FedAWA.'
    """
    name = name.rpartition(".")[2]
    server = name in class_names("aggregator")
    method = next((each for each in METHODS if squeezed(each.name) == squeezed(name)), None)
    if method is not None:
        ways = [f"--config methods/{method.file}"]
        ways += [f"--aggregator {name}"] if server else []
        return f"is {'a server side' if server else 'no client module but a method'}; give {', or '.join(ways)}."
    return f"is a server side; give --aggregator {name}." if server else ""


def other_class(message: str, match: re.Match[str], options: list[str]) -> str:
    """A class is known, and of another kind."""
    setting = locate(message, match)
    if setting.key == "model" and (advice := advice_on(match[1])):
        return f"model={match[1]} {advice}"
    names = class_names(setting.key.rpartition(".")[2])
    return f"{setting.key}={match[1]} is no {match[2]}{suggestion(match[1].rpartition('.')[2], names)}"


def no_module(message: str, match: re.Match[str], options: list[str]) -> str:
    """A class is named by a module that isn't there."""
    setting = locate(message, match)
    return f"{setting.key}={match[1]}: {match[2]}"


def no_value(message: str, match: re.Match[str], options: list[str]) -> str:
    """An option stands without its value, or with one that looks like an option."""
    name = match[1].rpartition("/")[2]
    below = " or a setting below it" if any(f"--{option}".startswith(f"{name}.") for option in options) else ""
    return f"{name}{below} needs a value; one that begins with a dash is given as --NAME=VALUE."


def no_mapping(message: str, match: re.Match[str], options: list[str]) -> str:
    """One value stands where many settings are asked for."""
    return f"{match[1]}={match[2]} must be settings by name, such as {nested(match[1], options)}."


def no_reading(message: str, match: re.Match[str], options: list[str]) -> str:
    """A number has a colon behind it, over which the parser's own reader of YAML stumbles."""
    return f"{locate(message, match).key} can't be read; take away the colon at its end, or put it in quotes."


def null_class(message: str, match: re.Match[str], options: list[str]) -> str:
    """A class, or its settings, are null."""
    return f"{locate(message, match).key}: class_path or init_args is null; give it a value, or leave it out."


def plateau(message: str, match: re.Match[str], options: list[str]) -> str:
    """There are two classes of this name, and neither will do."""
    return PLATEAU


def nested(name: str, options: list[str]) -> str:
    """An example of an option below another, as it is given."""
    return f"--{next((option for option in sorted(options) if option.startswith(f'{name}.')), name)}"


def remaining(message: str) -> str:
    """What a message says besides the types that a value could have had."""
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
"""How a message is recognised, the most telling part first."""
