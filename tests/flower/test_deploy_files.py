"""The files of examples/deploy: a script for certificates, a proxy's settings, units of systemd, and services of docker
compose."""

import configparser
import datetime
import ipaddress
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

x509 = pytest.importorskip("cryptography.x509", reason="needs the extra flower")

FILES = Path(__file__).parents[2] / "examples" / "deploy"
PROGRAMS = {"caddy", "flower-superlink", "flower-supernode", "pfl-lightning"}
COMMANDS = ("superlink.service", "proxy.service", "federation.service", "supernode.service", "compose.yaml")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl isn't installed")
@pytest.mark.parametrize("hosts", [["server.example"], ["10.0.0.1", "server.example", "superlink"]])
def test_certificates_are_by_the_authority_and_for_the_hosts(hosts, tmp_path):
    subprocess.run(["sh", FILES / "certificates.sh", *hosts], cwd=tmp_path, check=True, capture_output=True)
    assert {path.name for path in tmp_path.iterdir()} == {"ca.key", "ca.pem", "ca.srl", "server.key", "server.pem"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*.key"))
    authority, server = (x509.load_pem_x509_certificate((tmp_path / f"{n}.pem").read_bytes()) for n in ("ca", "server"))
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    # the SuperLink's own programs, and the proxy, reach it by the loopback
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(host) for host in ("127.0.0.1", *hosts) if host[0].isdigit()
    ]
    assert names.get_values_for_type(x509.DNSName) == [host for host in hosts if not host[0].isdigit()]
    assert server.not_valid_after_utc > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=300)


def words_of(unit):
    """The command line of a unit or a service."""
    if unit.suffix == ".service":
        parser = configparser.ConfigParser(interpolation=None, strict=False, comment_prefixes=("#",))
        parser.optionxform = str
        parser.read_string(unit.read_text().replace("\\\n", " "))
        assert parser["Service"]["Restart"] in ("always", "on-failure")
        return [shlex.split(parser["Service"]["ExecStart"])]
    return [shlex.split(service["command"]) for service in yaml.safe_load(unit.read_text())["services"].values()]


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_those_of_the_page(name):
    page = (FILES.parents[1] / "docs" / "deployment.md").read_text()
    for program, *words in words_of(FILES / name):
        assert Path(program).name in PROGRAMS
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert all(option in page for option in options)
        # else a SuperLink that is started again has forgotten its sites
        assert Path(program).name != "flower-superlink" or "--database" in options


@pytest.mark.parametrize("name", COMMANDS)
def test_programs_and_options_are_those_installed(name, monkeypatch, capsys):
    for program, *words in words_of(FILES / name):
        program = Path(program).name
        if program == "caddy":
            # it isn't Python's, and a test on loopback runs it
            continue
        (entry,) = entry_points(group="console_scripts", name=program)
        # a command and its subcommands, such as `flower run`
        commands = words[:2] if program == "pfl-lightning" else []
        monkeypatch.setattr(sys, "argv", [program, *commands, "--help"])
        with pytest.raises(SystemExit) as end:
            entry.load()()
        assert not end.value.code
        known = capsys.readouterr().out.split()
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= {word.strip("[],") for word in known}, program


def test_services_of_compose_are_complete():
    services = yaml.safe_load((FILES / "compose.yaml").read_text())["services"]
    for service in services.values():
        assert service["image"] and service["command"] and service["working_dir"]
        # each folder within a container is one of the host's, and no two of one container are the same
        targets = [volume.partition(":")[2] for volume in service["volumes"]]
        assert all(target.startswith("/") for target in targets) and len(set(targets)) == len(targets)
    # sites find the server by its service's name, and only its proxy is reached from without
    linked = [re.findall(r"--superlink (\S+)", service["command"]) for service in services.values()]
    assert [word for words in linked for word in words] == ["superlink:8443"] * 2
    assert {name: service["ports"] for name, service in services.items() if "ports" in service} == {
        "superlink": ["8443:8443"]
    }
    # the loopback that the SuperLink listens at is theirs too
    inside = {name for name, service in services.items() if service.get("network_mode") == "service:superlink"}
    assert inside == {"proxy", "federation"}


@pytest.mark.parametrize("name", ["superlink.service", "compose.yaml"])
def test_the_superlink_listens_on_the_loopback_alone(name):
    (words,) = (words for words in words_of(FILES / name) if Path(words[0]).name == "flower-superlink")
    options = dict(pairwise(words))
    # what the proxy passes sites' requests on to
    assert f"https://{options['--host']}:{options['--port']}" in (FILES / "Caddyfile").read_text()
    assert options["--host"] == "127.0.0.1" and "--insecure" not in words and "--enable-supernode-auth" in words
