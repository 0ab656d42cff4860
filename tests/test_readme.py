"""The README is true: its code is put in and its commands are run, in a copy of the repository."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

from cluster import testbed
from runs.config import check
from tests.conftest import ROOT, run

README = (ROOT / "README.md").read_text()
PAGES = {page: page.read_text() for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]}
PAGES |= {
    page: page.read_text() for page in [ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/NOTES.md"]
}


def blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```([a-z ]+)\n(.*?)^```$", text, re.M | re.S)


BLOCKS = blocks(README)
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
NOT_HERE = {"make test"}  # this is it
ACTIVATE = ". .venv/bin/activate"
TRAINER = "conf/trainer/default.yaml"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository as it stands, with the README's files in it and this environment."""
    folder = tmp_path_factory.mktemp("readme") / "copy"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
            (folder / name).chmod((ROOT / name).stat().st_mode)
    (folder / ".venv").symlink_to(sys.prefix)
    for kind, text in BLOCKS:
        if kind in ("python", "yaml"):
            name = text.splitlines()[0].removeprefix("# ")
            (folder / name).write_text(text)
    return folder


def test_there_is_something_to_run() -> None:
    assert "make train" in COMMANDS and "make test" in COMMANDS and ACTIVATE in COMMANDS
    assert len(COMMANDS) > 8 and sum(kind == "python" for kind, _ in BLOCKS) == 2


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, marks=[pytest.mark.slow, pytest.mark.timeout(900)] * ("experiment=" in c))
        for c in COMMANDS
        if c not in {*NOT_HERE, ACTIVATE}
    ],
)
def test_each_command_runs(copy: Path, command: str) -> None:
    # `python` and `horovodrun` are typed after the line that activates the environment.
    typed = command if command.startswith("make") else f"{ACTIVATE} && {command}"
    before = set(copy.glob("logs/*/runs/*/summary.json"))
    if "experiment=" not in command and command != "make train":  # which shows that it learns
        typed = f"sed -i 's/^max_epochs: 50$/max_epochs: 3/' {TRAINER} && {typed}"
    done = run(["sh", "-c", typed], cwd=copy, timeout=850)
    (copy / TRAINER).write_bytes((ROOT / TRAINER).read_bytes())
    assert done.returncode == 0, done.stdout
    new = set(copy.glob("logs/*/runs/*/summary.json")) - before
    assert len(new) == (0 if "--help" in command else 1)
    summary = json.loads(new.pop().read_text()) if new else {}
    if "experiment=denoiser" in command:  # as the header of its file says
        metrics = summary["metrics"]
        assert summary["world_size"] == 2 and 24.9 <= metrics["test/psnr"] <= 26
        assert 19.9 <= metrics["test/psnr_noisy"] <= 20.1
    if command == "make train":
        assert summary["world_size"] == 2 and summary["metrics"]["test/acc"] >= 0.97
        assert "horovodrun -np 2 -H localhost:2 .venv/bin/python template.py" in done.stdout


def test_the_chapter_on_many_hosts(copy: Path) -> None:
    """Its commands in their order, with a process a host, on hosts made of this one."""
    if problem := testbed.missing():
        pytest.skip(f"no test hosts: {problem}")
    page = blocks(PAGES[ROOT / "docs" / "hosts.md"])
    commands = [line for kind, text in page if kind == "sh hosts" for line in text.splitlines()]
    for typed in re.findall(r"^    (make \w+ HOSTS=\S+)", README, re.M):
        assert typed in [" ".join(command.split()[:3]) for command in commands], typed
    targets = [command.split()[1] for command in commands]
    assert targets == ["doctor", "sync", "train", "launch", "status", "logs", "stop"]
    with testbed.Testbed(2) as hosts:
        for command in commands:
            typed = command.replace("node1:2,node2:2", "node1:1,node2:1")
            done = run(hosts[0].command("env", "-C", str(copy), "sh", "-c", typed))
            assert done.returncode == 0, f"{typed}\n{done.stdout}"
            if " train " in typed:
                assert "ranks   2: 1 on node1, 1 on node2" in done.stdout
    assert "stopped" in run(["make", "status"], cwd=copy).stdout


def test_its_model_learns_a_batch_of_its_data_by_heart() -> None:
    """As debug=overfit shows whoever has put them in."""
    code: dict[str, Any] = {}
    configs = [yaml.safe_load(text) for kind, text in BLOCKS if kind == "yaml"]
    for kind, text in BLOCKS:
        if kind == "python":
            exec(text, code)
    lr = float(next(keys["lr"] for keys in configs if "lr" in keys))
    torch.manual_seed(0)
    model, data = code["Perceptron"](lr, 2, 2), code["Spirals"](32, 1000)
    data.setup("fit")
    batch, optimizer = next(iter(data.train_dataloader())), model.configure_optimizers()
    for _ in range(200):
        optimizer.zero_grad()
        loss = cross_entropy(model.network(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
    assert loss < 0.05


@pytest.mark.slow
def test_the_new_files_are_found_by_the_tests(copy: Path) -> None:
    done = run([".venv/bin/python", "-m", "pytest", "tests/test_conf.py", "-k", "each"], cwd=copy)
    assert done.returncode == 0, done.stdout
    files = [*copy.glob("conf/data/*.yaml"), *copy.glob("conf/model/*.yaml")]
    assert {"spirals", "perceptron"} <= {file.stem for file in files}
    assert f"{len(files)} passed" in done.stdout, done.stdout


def test_tensorboard_answers(copy: Path) -> None:
    make = subprocess.Popen(
        ["make", "tensorboard", "ARGS=--port 0 --host 127.0.0.1"], cwd=copy, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        assert make.stdout is not None
        match = next(filter(None, (re.search(r" at (http://\S+)", line) for line in make.stdout)))
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(match[1], timeout=60) as answer:
            assert answer.status == 200 and b"TensorBoard" in answer.read()
    finally:
        os.killpg(make.pid, signal.SIGTERM)
        make.wait(timeout=30)


def test_overrides_that_it_names_exist() -> None:
    text = README + "".join(text for page, text in PAGES.items() if page.parent.name == "docs")
    key = re.compile(r"[+~]?[a-z][a-z0-9_.]*=\S+|~[a-z_.]+")
    spans = {
        span for span in re.findall(r"`([^`\n]+)`", text) if all(map(key.fullmatch, span.split()))
    }
    python = {"grad=None", "sync_dist=True", "on_epoch=True", "gather_distributed=True"}
    assert len(spans) > 30 and any(span.startswith("+") for span in spans)
    for span in spans - {"key=value"} - python:
        check(span.split())


def test_files_that_it_names_exist() -> None:
    tree = re.findall(r"^    ([A-Za-z.]+/?) {2,}", README, re.M)
    assert len(tree) > 8
    for name in tree:
        assert (ROOT / name).exists(), name


def test_links_lead_somewhere() -> None:
    """To files, and to headings in them; addresses in the web are not tried."""
    links = [
        (page, *link)
        for page, text in PAGES.items()
        for link in re.findall(r'(?:\]\(|src=")((?!http)[^)"#]*)(?:#([^)"]+))?[)"]', text)
    ]
    assert len(links) >= 10
    for page, name, heading in links:
        file = page.parent / name if name else page
        assert file.exists(), f"{page.name}: {name}"
        titles = re.findall(r"^#+ (.+)$", PAGES.get(file.resolve(), ""), re.M)
        anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
        assert not heading or heading in anchors, f"{page.name}: {name}#{heading}"


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 350


@pytest.mark.parametrize("title", ["Put your model in", "Put your data in"])
def test_the_recipes_are_short(title: str) -> None:
    section = README.split(f"## {title}\n")[1].split("\n## ")[0]
    code = [text for _, text in re.findall(r"^```([a-z ]+)\n(.*?)^```$", section, re.M | re.S)]
    assert sum(len(text.splitlines()) for text in code) < 40
