"""The scripts of the page on clusters: Bash and YAML parse, and every robboost command in them has these options."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from robboost.cli.application import app

PAGE = (Path(__file__).parents[1] / "docs" / "clusters.md").read_text()
BASH = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
(YAML,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def commands() -> list[list[str]]:
    """What follows `robboost`, or the name that `launch` gives it, in every script."""
    found = []
    for script in [*BASH, "\n".join(c for job in jobs() for c in job["args"])]:
        lines = re.sub(r"\\\n", " ", script).splitlines()
        for line in lines:
            words = shlex.split(line, comments=True)
            if words[:1] == ["launch"]:
                found.append(words[3:])
            elif "robboost" in words and "${@:3}" not in words:
                found.append(words[words.index("robboost") + 1 :])
    return found


def jobs() -> list[dict]:
    documents = list(yaml.safe_load_all(YAML))
    return [c for d in documents if d["kind"] == "Job" for c in d["spec"]["template"]["spec"]["containers"]]


@pytest.mark.parametrize("script", BASH)
def test_bash_parses(script):
    found = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_pods_find_each_other():
    service, job = yaml.safe_load_all(YAML)
    spec = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["subdomain"] == service["metadata"]["name"]
    (words,) = [shlex.split(c["args"][0]) for c in spec["containers"]]
    assert f"--nnodes={job['spec']['completions']}" in words
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    assert f"--master-addr={job['metadata']['name']}-0.{service['metadata']['name']}" in words
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for c in spec["containers"] for mount in c["volumeMounts"]} == volumes


def test_every_command_has_the_options_that_the_page_gives_it():
    group = typer.main.get_command(app)
    found = commands()
    assert len(found) == 7
    for words in found:
        name = next(w for w in words if w in group.commands)
        outer, inner = words[: words.index(name)], words[words.index(name) + 1 :]
        for given, command in ((outer, group), (inner, group.commands[name])):
            known = {option for parameter in command.params for option in parameter.opts}
            assert {w for w in given if w.startswith("--")} <= known, words


def test_the_launcher_s_options_exist():
    from torch.distributed.run import get_args_parser

    known = {option for action in get_args_parser()._actions for option in action.option_strings}
    used = {
        o.split("=")[0] for o in re.findall(r"(?<!\S)--(?:nnodes|nproc|node-rank|rdzv|master|max|standalone)\S*", PAGE)
    }
    assert len(used) >= 8
    assert {o.strip("`") for o in used} <= known
