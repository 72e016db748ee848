"""examples/deploy: what the files say of flags, ports, paths and metrics is what the programs have."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from test_observability_examples import told

from wicore_trt.cli import serve
from wicore_trt.config import ServerSettings
from wicore_trt.http.routes import name_path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "deploy"
SMG = ROOT / ".venv-fleet-smg" / "bin" / "smg"

app = typer.Typer(add_completion=False)
app.command()(serve.command)
SERVE = {flag for param in typer.main.get_command(app).params for flag in param.opts}


def text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def flags_of(arguments: list[str]) -> dict[str, str]:
    """Values by flag; a flag without one has the next flag, or nothing."""
    return {a: b for a, b in zip(arguments, [*arguments[1:], ""], strict=True) if a.startswith("--")}


def commands(content: str, program: str) -> list[list[str]]:
    """Command lines of a program in a page or a unit."""
    lines = content.replace("\\\n", " ").splitlines()
    found = [re.search(rf"(?:^|[ /=])({program}\b.*)", line) for line in lines]
    return [shlex.split(match[1].rstrip("&' "), comments=True) for match in found if match]


def manifests() -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(text("kubernetes.yaml")) if found]


def manifest(kind: str, name: str) -> dict[str, Any]:
    [found] = [m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def smg_lines() -> list[list[str]]:
    [pod] = manifest("Deployment", "smg")["spec"]["template"]["spec"]["containers"]
    compose = yaml.safe_load(text("compose.yaml"))["services"]["router"]["command"]
    lines = commands(text("README.md"), "smg launch") + commands(text("smg.service"), "smg launch")
    return [*lines, [*pod["command"], *pod["args"]], shlex.split(compose[compose.index("smg launch") :].rstrip("' \n"))]


def serve_lines() -> list[list[str]]:
    [pod] = manifest("StatefulSet", "wicore")["spec"]["template"]["spec"]["containers"]
    compose = yaml.safe_load(text("compose.yaml"))["services"]["worker-1"]["command"]
    [image] = re.findall(r"^CMD (\[.*\])", text("Dockerfile"), re.MULTILINE)
    lines = commands(text("README.md"), "wicore serve") + commands(text("wicore.service"), "wicore serve")
    return [*(line[2:] for line in lines), pod["args"], compose, yaml.safe_load(image)]


def test_every_line_that_serves_has_flags_that_exist():
    lines = [line for line in serve_lines() if line]
    assert len(lines) >= 6
    for line in lines:
        assert set(flags_of(line)) <= SERVE, line
        assert line[0] == "/engines/model"


@pytest.mark.skipif(not SMG.exists(), reason="no environment with smg: make test-fleet makes it")
def test_every_line_of_smg_has_flags_that_exist():
    known = subprocess.run([SMG, "launch", "--help"], capture_output=True, text=True, check=True).stdout
    for line in smg_lines():
        assert set(flags_of(line)) <= set(re.findall(r"--[a-z][a-z0-9-]*", known)), line


def test_smg_finds_the_workers_that_are_started():
    assert len(smg_lines()) == 4
    readme, unit, pod, compose = smg_lines()
    ports = [
        flags_of(line)["--grpc-port"] for line in commands(text("README.md"), "wicore serve") if "--grpc-port" in line
    ]
    for line in (readme, unit):
        assert [url.rpartition(":")[2] for url in line if url.startswith("grpc://")] == ports
    stateful = manifest("StatefulSet", "wicore")["spec"]
    names = [f"grpc://wicore-{i}.{stateful['serviceName']}:50051" for i in range(stateful["replicas"])]
    assert [url for url in pod if url.startswith("grpc://")] == names
    workers = [name for name in yaml.safe_load(text("compose.yaml"))["services"] if name.startswith("worker")]
    assert [url for url in compose if url.startswith("grpc://")] == [f"grpc://{name}:50051" for name in workers]


def test_probes_ports_and_grace_fit_the_server():
    spec = manifest("StatefulSet", "wicore")["spec"]["template"]["spec"]
    [pod] = spec["containers"]
    given, ports = flags_of(pod["args"]), {port["name"]: str(port["containerPort"]) for port in pod["ports"]}
    assert (ports["grpc"], ports["http"]) == (given["--grpc-port"], given["--http-port"])
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert (
            name_path(pod[name]["httpGet"]["path"]) == pod[name]["httpGet"]["path"]
            and pod[name]["httpGet"]["port"] in ports
        )
    assert pod["readinessProbe"]["httpGet"]["path"] == "/ready" and pod["livenessProbe"]["httpGet"]["path"] == "/health"
    assert spec["terminationGracePeriodSeconds"] > float(given["--grace"])
    mounts = [mount["mountPath"] for mount in pod["volumeMounts"]]
    assert any(given["--kv-disk"].startswith(mount) for mount in mounts)
    worker = yaml.safe_load(text("compose.yaml"))["services"]["worker-1"]
    assert int(worker["stop_grace_period"].rstrip("s")) > float(flags_of(worker["command"])["--grace"])
    [unit] = commands(text("wicore.service"), "wicore serve")
    assert int(re.findall(r"TimeoutStopSec=(\d+)", text("wicore.service"))[0]) > float(flags_of(unit)["--grace"])


def test_manifests_name_one_another():
    kinds = {(m["kind"], m["metadata"]["name"]) for m in manifests()}
    assert len(kinds) == len(manifests()) and all(m["apiVersion"] for m in manifests())
    labels = [m["spec"]["template"]["metadata"]["labels"] for m in manifests() if "template" in m.get("spec", {})]
    for found in manifests():
        selector = found["spec"].get("selector") or found["spec"].get("podSelector")
        wanted = selector.get("matchLabels", selector)
        assert any(wanted.items() <= label.items() for label in labels), found["metadata"]


def test_kubernetes_knows_every_field():
    """Of its own kinds; InferencePool is the gateway API's."""
    own = [found for found in manifests() if found["kind"] != "InferencePool"]
    for found in own:
        kubernetes_validate.validate(found, "1.34", strict=True)
    own[0]["spec"]["nothingLikeIt"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(own[0], "1.34", strict=True)
    assert len(own) == len(manifests()) - 1


def test_the_image_has_what_its_commands_need():
    """Instructions that exist, extras of the package, users and folders that were made before, the server's ports."""
    lines = [line for line in text("Dockerfile").replace("\\\n", " ").splitlines() if line and line[0] != "#"]
    words = [line.split(maxsplit=1)[0] for line in lines]
    known = "FROM ARG RUN COPY USER ENV VOLUME EXPOSE STOPSIGNAL HEALTHCHECK ENTRYPOINT CMD"
    assert words[0] == "FROM" and set(words) <= set(known.split())
    assert words.count("ENTRYPOINT") == words.count("CMD") == 1
    content = "\n".join(lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = re.findall(r"EXTRAS=([\w,]+)", content + text("README.md"))
    assert len(asked) == 2 and all(set(extras.split(",")) <= {*project["optional-dependencies"]} for extras in asked)
    entry = yaml.safe_load(re.findall(r"^ENTRYPOINT (\[.*\])", content, re.MULTILINE)[0])
    assert entry == ["wicore", "serve"] and entry[0] in project["scripts"]
    [user] = re.findall(r"^USER (\w+)", content, re.MULTILINE)
    [volumes] = re.findall(r"^VOLUME (\[.*\])", content, re.MULTILINE)
    assert f"{user} /var/cache/wicore" in content[: content.index("USER")] and "/engines" in yaml.safe_load(volumes)
    [exposed] = re.findall(r"^EXPOSE (\d+) (\d+)$", content, re.MULTILINE)
    assert exposed == (str(ServerSettings().port), str(ServerSettings().http_port))
    assert re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", content) == [(exposed[1], name_path("/ready"))]


def test_compose_names_what_it_has():
    """Networks, volumes and the build's files; every variable is set or must be."""
    compose = yaml.safe_load(text("compose.yaml"))
    known = {"image", "build", "command", "networks", "stop_grace_period", "restart", "volumes", "environment", "ports"}
    used: set[str] = set()
    for service in compose["services"].values():
        assert set(service) <= known and {*service["networks"]} <= {*compose["networks"]}
        used |= {volume.split(":")[0] for volume in service.get("volumes", []) if volume[0] not in "$./"}
    assert used == {*compose["volumes"]}
    build = compose["x-worker"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).resolve() == FOLDER / "Dockerfile"
    variables = re.findall(r"(?<!\$)\$\{(\w+)(:.)?", text("compose.yaml"))
    assert variables and all(kind in (":-", ":?") for _, kind in variables)


def test_what_pickers_read_is_told():
    names = set(re.findall(r"vllm:\w+", text("kubernetes.yaml") + text("README.md")))
    assert len(names) == 4 and names <= set(told())


def test_nginx_passes_what_the_server_serves():
    content = text("nginx.conf")
    assert content.count("{") == content.count("}")
    served = {flags_of(line)[flag] for line in commands(text("README.md"), "wicore serve") if "--grpc-port" in line
              for flag in ("--grpc-port", "--http-port")}  # fmt: skip
    assert set(re.findall(r"server 127\.0\.0\.1:(\d+)", content)) == served
    assert {name_path(path) for path in re.findall(r"location = (\S+)", content)} == {"/v1/stream", "/metrics"}


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_takes_its_file(tmp_path):
    content = re.sub(r"\n\s*(ssl_certificate.*|http2 on;)", "", text("nginx.conf")).replace("443 ssl", "18443")
    (tmp_path / "nginx.conf").write_text(content)
    subprocess.run(["nginx", "-t", "-p", tmp_path, "-c", tmp_path / "nginx.conf"], check=True)


@pytest.mark.parametrize("unit", ["wicore.service", "smg.service"])
def test_systemd_knows_every_line(unit, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    content = re.sub(r"(Exec\w+=)\S+", r"\1/bin/true", text(unit)).replace("User=wicore", "User=root")
    (tmp_path / unit).write_text(content)
    told = subprocess.run(["systemd-analyze", "verify", tmp_path / unit], capture_output=True, text=True, check=False)
    assert not [line for line in told.stderr.splitlines() if unit in line], told.stderr
