"""The container files, as far as they can be checked without a container engine: docs/containers.md says what ran."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

import click
import pytest
import yaml  # type: ignore[import-untyped]  # it has no types of its own

from hardpoint.cli.serve import serve
from hardpoint.terminal.lazy import HELP_OPTIONS

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "containers").glob("*.Dockerfile"))


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a container file, each with its arguments on one line."""
    text = re.sub(r"^#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in lines) if word]


def last_stage(file: Path) -> dict[str, str]:
    """The last of each kind of instruction in the stage that becomes the image."""
    found = instructions(file)
    start = max(i for i, (word, _) in enumerate(found) if word == "FROM")
    return dict(found[start:])


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def file(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_the_image_runs_the_server_without_root_and_says_whether_it_is_well(file: Path) -> None:
    stage = last_stage(file)
    user = int(stage["USER"].split(":")[0])
    assert user > 0
    assert re.search(rf"useradd --uid {user} ", stage["RUN"])
    assert json.loads(stage["ENTRYPOINT"]) == ["hardpoint"]
    check = json.loads(stage["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "healthcheck", "exec")
    assert f":{stage['EXPOSE']}/health'" in check[2]


def test_its_command_is_one_that_serve_takes(file: Path) -> None:
    command, *arguments = json.loads(last_stage(file)["CMD"])
    assert command == "serve"
    flags = {
        flag for param in serve.get_params(click.Context(serve, help_option_names=HELP_OPTIONS)) for flag in param.opts
    }
    assert {argument for argument in arguments if argument.startswith("-")} <= flags
    assert arguments[arguments.index("--platform") + 1] == file.stem.partition(".")[0]


def test_what_it_copies_is_there_and_sent_to_the_builder(file: Path) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for word, rest in instructions(file):
        if word == "COPY" and "--from" not in rest:
            source = rest.split()[0]
            assert (ROOT / source).exists()
            assert any(fnmatch(source, pattern) or source.startswith(f"{pattern}/") for pattern in sent)


def test_versions_are_pinned(file: Path) -> None:
    found = instructions(file)
    (base,) = (rest.partition("=")[2] for word, rest in found if word == "ARG" and rest.startswith("BASE="))
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base)
    installs = [part for word, rest in found if word == "RUN" for part in rest.split("&&") if "pip install" in part]
    assert installs
    assert all("--constraint" in part or "torch==" in part for part in installs)


def test_the_job_of_kuberay_serves_on_all_gpus_that_it_asks_for() -> None:
    job = yaml.safe_load((ROOT / "containers" / "kuberay.yaml").read_text(encoding="utf-8"))
    name, command, _, *flags = job["spec"]["entrypoint"].split()
    assert (name, command) == ("hardpoint", "serve")
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given.keys() <= {
        flag for param in serve.get_params(click.Context(serve, help_option_names=HELP_OPTIONS)) for flag in param.opts
    }
    assert given["--executor"] == "ray"
    cluster = job["spec"]["rayClusterSpec"]
    groups = [(1, cluster["headGroupSpec"]), *((group["replicas"], group) for group in cluster["workerGroupSpecs"])]
    gpus = 0
    for replicas, group in groups:
        (container,) = group["template"]["spec"]["containers"]
        gpus += replicas * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert int(given["--pipeline-parallel-size"]) * int(given["--tensor-parallel-size"]) == gpus
